"""Gated linear units: act(gate) * up, forward and backward in one pass each (Shazeer 2020: SwiGLU, GeGLU).

act: silu(x) = x sigmoid(x); gelu_tanh(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)); gelu(x) = x/2 (1 + erf(x / sqrt 2)). Backward computes the
activation again and keeps nothing but the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel
from partita_kernels.rows import as_rows, like, wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
EXACT_GELU = 2
BLOCK = 1024  # elements of a Triton program


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all [..., C]; gate and up may be slices of one tensor."""
    return torch.ops.partita.glu(gate, up, 0)


def swiglu_halves(x: Tensor) -> Tensor:
    """silu(gate) * up of x [..., 2C] = (gate, up) -> [..., C]. The gradient is written as one tensor, which `swiglu` of slices has to join."""
    return torch.ops.partita.glu_halves(x, 0)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * up, all [..., C]; approximate: "tanh" or "none" as in torch. Raises ValueError for others."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"approximate={approximate!r}: there are 'tanh' and 'none'")
    return torch.ops.partita.glu(gate, up, KINDS["gelu_tanh" if approximate == "tanh" else "gelu"])


# ---- plain torch


def _activate(x: Tensor, kind: int) -> Tensor:
    if kind == KINDS["silu"]:
        return F.silu(x)
    return F.gelu(x, approximate="none" if kind == EXACT_GELU else "tanh")


def reference(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """gate, up [R, C] -> [R, C]."""
    return (_activate(wide(gate), kind) * wide(up)).to(gate.dtype)


def reference_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, [R, C] each."""
    d, x = wide(dy), wide(gate)
    if kind == KINDS["silu"]:
        dx = torch.ops.aten.silu_backward(d * wide(up), x)
    else:
        dx = torch.ops.aten.gelu_backward(d * wide(up), x, approximate="none" if kind == EXACT_GELU else "tanh")
    return dx.to(gate.dtype), (d * _activate(x, kind)).to(up.dtype)


# ---- Triton


@kernel
def _share(x, KIND: tl.constexpr):
    """The factor s in act(x) = x s."""
    if KIND == 2:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 1:
        return tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        return tl.sigmoid(x)


@kernel
def _slope(x, s, KIND: tl.constexpr):
    """Derivative of act at x, where s is its factor."""
    if KIND == 2:
        return s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 1:
        return s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        return s * (1.0 + x * (1.0 - s))


@kernel
def _forward(g_ptr, u_ptr, y_ptr, n, g_stride, u_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < n
    g = tl.load(g_ptr + row * g_stride + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + c, mask=inside, other=0.0).to(tl.float32)
    y = g * _share(g, KIND) * u
    tl.store(y_ptr + row * n + c, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _backward(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, n, dy_stride, g_stride, u_stride, out_stride, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < n
    d = tl.load(dy_ptr + row * dy_stride + c, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + c, mask=inside, other=0.0).to(tl.float32)
    s = _share(g, KIND)
    tl.store(dg_ptr + row * out_stride + c, (d * u * _slope(g, s, KIND)).to(dg_ptr.dtype.element_ty), mask=inside)
    tl.store(du_ptr + row * out_stride + c, (d * g * s).to(du_ptr.dtype.element_ty), mask=inside)


def triton(gate: Tensor, up: Tensor, kind: int, block: int = BLOCK) -> Tensor:
    """As `reference`."""
    if gate.dtype == torch.float64:
        return reference(gate, up, kind)
    y, (rows, n) = like(gate), gate.shape
    if y.numel():
        _forward[(rows, cdiv(n, block))](gate, up, y, n, gate.stride(0), up.stride(0), KIND=kind, BLOCK=block)
    return y


def triton_backward(
    dy: Tensor, gate: Tensor, up: Tensor, kind: int, joined: Tensor | None = None, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """As `reference_backward`. joined [R, 2C]: where both are to be written."""
    if gate.dtype == torch.float64:
        return _put(reference_backward(dy, gate, up, kind), joined)
    (dg, du), (rows, n) = _outputs(gate, up, joined), gate.shape
    if dy.numel():
        strides = (dy.stride(0), gate.stride(0), up.stride(0), dg.stride(0))
        _backward[(rows, cdiv(n, block))](dy, gate, up, dg, du, n, *strides, KIND=kind, BLOCK=block)
    return dg, du


# ---- CPU


def cpu(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """As `reference`."""
    library = native.load("layers") if _fits(gate, up, kind) else None
    if library is None:
        return reference(gate, up, kind)
    y, p = like(gate), native.pointer
    sizes = map(native.integer, (*gate.shape, gate.stride(0), up.stride(0)))
    library.glu_forward(p(gate), p(up), p(y), *sizes, kind, native.DTYPES[gate.dtype], native.threads())
    return y


def cpu_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: int, joined: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `reference_backward`. joined [R, 2C]: where both are to be written."""
    library = native.load("layers") if dy.dtype == gate.dtype and _fits(gate, up, kind) else None
    if library is None:
        return _put(reference_backward(dy, gate, up, kind), joined)
    (dg, du), p = _outputs(gate, up, joined), native.pointer
    sizes = map(native.integer, (*gate.shape, dy.stride(0), gate.stride(0), up.stride(0), dg.stride(0)))
    library.glu_backward(p(dy), p(gate), p(up), p(dg), p(du), *sizes, kind, native.DTYPES[gate.dtype], native.threads())
    return dg, du


def _fits(gate: Tensor, up: Tensor, kind: int) -> bool:
    """Does the C++ path have it? It has no error function."""
    return kind != EXACT_GELU and gate.dtype == up.dtype and gate.dtype in native.DTYPES


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the gate and rows of what it is for."""
    rows = as_rows(x)
    return rows[:, : rows.shape[1] // 2], rows[:, rows.shape[1] // 2 :]


def _outputs(gate: Tensor, up: Tensor, joined: Tensor | None) -> tuple[Tensor, Tensor]:
    """Unwritten gradients, rows of the same distance."""
    return (like(gate), like(up)) if joined is None else _halves(joined)


def _put(gradients: tuple[Tensor, Tensor], joined: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients that lie elsewhere, where they are to be."""
    return gradients if joined is None else _halves(torch.cat(gradients, 1, out=joined))


# ---- one operation

GLU = Operation("glu", reference, triton, cpu)
GLU_BACKWARD = Operation("glu_backward", reference_backward, triton_backward, cpu_backward)


@torch.library.custom_op("partita::glu", mutates_args=(), schema="(Tensor gate, Tensor up, int kind) -> Tensor")
def _glu(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    return GLU.on(gate.device)(as_rows(gate), as_rows(up), kind).view(gate.shape)


@torch.library.custom_op(
    "partita::glu_backward", mutates_args=(), schema="(Tensor dy, Tensor gate, Tensor up, int kind) -> (Tensor, Tensor)"
)
def _glu_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    dg, du = GLU_BACKWARD.on(dy.device)(as_rows(dy), as_rows(gate), as_rows(up), kind)
    return dg.view(gate.shape), du.view(up.shape)


@_glu.register_fake
def _glu_fake(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    return like(gate)


@_glu_backward.register_fake
def _glu_backward_fake(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    return like(gate), like(up)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    return *torch.ops.partita.glu_backward(dy, *ctx.saved_tensors, ctx.kind), None


_glu.register_autograd(_differentiate, setup_context=_save)


# ---- of both halves of a tensor


@torch.library.custom_op("partita::glu_halves", mutates_args=(), schema="(Tensor x, int kind) -> Tensor")
def _glu_halves(x: Tensor, kind: int) -> Tensor:
    return GLU.on(x.device)(*_halves(x), kind).view(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("partita::glu_halves_backward", mutates_args=(), schema="(Tensor dy, Tensor x, int kind) -> Tensor")
def _glu_halves_backward(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    implementation, given = GLU_BACKWARD.on(x.device), (as_rows(dy), *_halves(x), kind)
    if implementation not in (GLU_BACKWARD.triton, GLU_BACKWARD.cpu):
        return torch.cat(implementation(*given), 1).view(x.shape)
    joined = like(as_rows(x))
    implementation(*given, joined)
    return joined.view(x.shape)


@_glu_halves.register_fake
def _glu_halves_fake(x: Tensor, kind: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@_glu_halves_backward.register_fake
def _glu_halves_backward_fake(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    return like(x)


def _save_halves(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _differentiate_halves(ctx, dy):  # type: ignore[no-untyped-def]
    return torch.ops.partita.glu_halves_backward(dy, *ctx.saved_tensors, ctx.kind), None


_glu_halves.register_autograd(_differentiate_halves, setup_context=_save_halves)
