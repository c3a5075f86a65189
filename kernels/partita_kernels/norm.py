"""RMSNorm and LayerNorm over the last dimension, with an optional residual added before, forward and backward.

total = x + residual; y = (total - mean) * rstd * weight + bias, where RMSNorm has neither mean nor bias. Sums are float32 (float64 for
float64 inputs). Backward, with d = dy * weight and n = (total - mean) * rstd: dtotal = rstd * (d - avg(d) - n * avg(n * d)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel, power_of_2
from partita_kernels.rows import as_rows, like, wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor
Forward = tuple[Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor]

LONGEST_ROW = 16384  # elements that one Triton program holds in registers
PROGRAMS = 512  # Triton programs of a backward: each sums its own part of the weight's gradient
PARTS = 64  # the same on a CPU, whatever the number of threads, so that results don't depend on it


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) of x [..., C] with weight [C]: [..., C] in the dtype of x."""
    return torch.ops.partita.norm(x, None, weight, None, eps, False)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(RMSNorm of the sum, x + residual), both like x [..., C]."""
    return torch.ops.partita.norm(x, residual, weight, None, eps, False)[:2]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """LayerNorm (Ba et al. 2016) of x [..., C] with weight and bias [C]: [..., C] in the dtype of x."""
    return torch.ops.partita.norm(x, None, weight, bias, eps, True)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """(LayerNorm of the sum, x + residual), both like x [..., C]."""
    return torch.ops.partita.norm(x, residual, weight, bias, eps, True)[:2]


# ---- plain torch


def reference(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> Forward:
    """x, residual [R, C] -> y [R, C], total [R, C] (empty without residual), mean [R] (empty for RMSNorm), rstd [R]."""
    total = x if residual is None else x + residual
    t = wide(total)
    mean = t.mean(1) if center else t.new_empty(0)
    n = t - mean[:, None] if center else t
    rstd = torch.rsqrt(n.square().mean(1) + eps)
    y = n * rstd[:, None] * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), x.new_empty(0) if residual is None else total, mean, rstd


def reference_backward(dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool) -> Backward:
    """dtotal [R, C], dweight [C], dbias [C] (empty for RMSNorm)."""
    t, g = wide(total), wide(dy)
    n = (t - mean[:, None] if center else t) * rstd[:, None]
    d = g * weight
    dt = d - n * (n * d).mean(1, keepdim=True)
    dt = dt - d.mean(1, keepdim=True) if center else dt
    dbias = g.sum(0).to(weight.dtype) if center else weight.new_empty(0)
    return (dt * rstd[:, None]).to(dy.dtype), (g * n).sum(0).to(weight.dtype), dbias


# ---- Triton


@kernel
def _forward(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr, n, x_stride, res_stride, eps,
    RESIDUAL: tl.constexpr, BIAS: tl.constexpr, CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row for each program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < n
    t = tl.load(x_ptr + row * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        t += tl.load(res_ptr + row * res_stride + c, mask=inside, other=0.0).to(tl.float32)
        stored = t.to(total_ptr.dtype.element_ty)  # what backward will read is what is normalised here
        tl.store(total_ptr + row * n + c, stored, mask=inside)
        t = stored.to(tl.float32)
    if CENTER:
        mean = tl.sum(t, 0) / n
        t = tl.where(inside, t - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    rstd = tl.rsqrt(tl.sum(t * t, 0) / n + eps)
    tl.store(rstd_ptr + row, rstd)
    y = t * rstd * tl.load(w_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(b_ptr + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + c, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _backward(
    dy_ptr, t_ptr, w_ptr, mean_ptr, rstd_ptr, dt_ptr, dw_ptr, db_ptr, rounds, rows, n, dy_stride, t_stride,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every programs-th row for each program, and its part of the weight's gradient."""
    first = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < n
    w = tl.load(w_ptr + c, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for i in range(rounds):
        row = (first + i * tl.num_programs(0)).to(tl.int64)
        live = c < tl.where(row < rows, n, 0)
        at = tl.minimum(row, rows - 1)  # of the row's statistics
        g = tl.load(dy_ptr + row * dy_stride + c, mask=live, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + row * t_stride + c, mask=live, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + at)
        if CENTER:
            t = tl.where(live, t - tl.load(mean_ptr + at), 0.0)
            db += g
        norm = t * rstd
        dw += g * norm
        d = g * w
        dt = d - norm * (tl.sum(norm * d, 0) / n)
        if CENTER:
            dt = dt - tl.sum(d, 0) / n
        tl.store(dt_ptr + row * n + c, (dt * rstd).to(dt_ptr.dtype.element_ty), mask=live)
    out = first.to(tl.int64) * n + c
    tl.store(dw_ptr + out, dw, mask=inside)
    if CENTER:
        tl.store(db_ptr + out, db, mask=inside)


def _warps(block: int) -> int:
    """A thread holds at most 32 elements of a row."""
    return min(16, max(4, block // 1024))


def triton(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> Forward:
    """As `reference`; rows too long for one program go to it."""
    rows, n = x.shape
    if n > LONGEST_ROW or x.dtype == torch.float64:
        return reference(x, residual, weight, bias, eps, center)
    y, total, mean, rstd = _outputs(x, residual is not None, center)
    if x.numel():
        block = power_of_2(n)
        res = x if residual is None else residual
        tensors = (x, res, weight, weight if bias is None else bias, y, total, mean, rstd)
        constants = {"RESIDUAL": residual is not None, "BIAS": bias is not None, "CENTER": center, "BLOCK": block}
        _forward[(rows,)](*tensors, n, x.stride(0), res.stride(0), eps, **constants, num_warps=_warps(block))
    return y, total, mean, rstd


def triton_backward(
    dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool, programs: int = PROGRAMS
) -> Backward:
    """As `reference_backward`."""
    rows, n = dy.shape
    if n > LONGEST_ROW or dy.dtype == torch.float64 or dy.numel() == 0:
        return reference_backward(dy, total, weight, mean, rstd, center)
    block, programs = power_of_2(n), min(programs, rows)
    dt = like(dy)
    dw = torch.empty(programs, n, dtype=torch.float32, device=dy.device)
    db = torch.empty_like(dw) if center else dw
    _backward[(programs,)](
        dy, total, weight, mean, rstd, dt, dw, db, cdiv(rows, programs), rows, n, dy.stride(0), total.stride(0),
        CENTER=center, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    dbias = db.sum(0).to(weight.dtype) if center else weight.new_empty(0)
    return dt, dw.sum(0).to(weight.dtype), dbias


def _outputs(x: Tensor, residual: bool, center: bool) -> Forward:
    """Unwritten outputs of forward."""
    statistics = x.new_empty(x.shape[0], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    mean = torch.empty_like(statistics) if center else statistics.new_empty(0)
    return like(x), like(x) if residual else x.new_empty(0), mean, statistics


# ---- CPU


def cpu(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> Forward:
    """As `reference`, rows kept in the cache."""
    library = native.load("layers") if _fits(x, weight, residual, bias) else None
    if library is None:
        return reference(x, residual, weight, bias, eps, center)
    y, total, mean, rstd = _outputs(x, residual is not None, center)
    p = native.pointer
    library.norm_forward(
        p(x), p(residual), p(weight), p(bias), p(y), p(total if residual is not None else None), p(mean if center else None), p(rstd),
        *map(native.integer, (x.shape[0], x.shape[1], x.stride(0), 0 if residual is None else residual.stride(0))),
        native.single(eps), native.DTYPES[x.dtype], native.DTYPES[weight.dtype], native.threads(),
    )  # fmt: skip
    return y, total, mean, rstd


def cpu_backward(dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool) -> Backward:
    """As `reference_backward`, rows kept in the cache."""
    library = native.load("layers") if dy.numel() and _fits(dy, weight, total, None) else None
    if library is None:
        return reference_backward(dy, total, weight, mean, rstd, center)
    rows, n = dy.shape
    parts = min(PARTS, rows)
    dt, dw = like(dy), torch.empty(parts, n)
    db = torch.empty(parts, n) if center else None
    p = native.pointer
    library.norm_backward(
        p(dy), p(total), p(weight), p(mean if center else None), p(rstd), p(dt), p(dw), p(db),
        *map(native.integer, (rows, n, dy.stride(0), total.stride(0), parts)),
        native.DTYPES[dy.dtype], native.DTYPES[weight.dtype], native.threads(),
    )  # fmt: skip
    return dt, dw.sum(0).to(weight.dtype), weight.new_empty(0) if db is None else db.sum(0).to(weight.dtype)


def _fits(x: Tensor, weight: Tensor, other: Tensor | None, bias: Tensor | None) -> bool:
    """Are the formats those of the C++ path?"""
    same = (other is None or other.dtype == x.dtype) and (bias is None or bias.dtype == weight.dtype)
    return same and x.dtype in native.DTYPES and weight.dtype in (torch.float32, x.dtype)


# ---- one operation

NORM = Operation("norm", reference, triton, cpu)
NORM_BACKWARD = Operation("norm_backward", reference_backward, triton_backward, cpu_backward)


@torch.library.custom_op(
    "partita::norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool center) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> Forward:
    res = None if residual is None else as_rows(residual)
    y, total, mean, rstd = NORM.on(x.device)(
        as_rows(x), res, weight.contiguous(), None if bias is None else bias.contiguous(), eps, center
    )
    return y.view(x.shape), total if residual is None else total.view(x.shape), mean, rstd


@torch.library.custom_op(
    "partita::norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor total, Tensor weight, Tensor mean, Tensor rstd, bool center) -> (Tensor, Tensor, Tensor)",
)
def _norm_backward(dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool) -> Backward:
    dt, dw, db = NORM_BACKWARD.on(dy.device)(as_rows(dy), as_rows(total), weight.contiguous(), mean, rstd, center)
    return dt.view(dy.shape), dw, db


@_norm.register_fake
def _norm_fake(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool) -> Forward:
    y, total, mean, rstd = _outputs(x.reshape(-1, x.shape[-1]), residual is not None, center)
    return y.view(x.shape), total if residual is None else total.view(x.shape), mean, rstd


@_norm_backward.register_fake
def _norm_backward_fake(dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool) -> Backward:
    return like(dy), torch.empty_like(weight), torch.empty_like(weight) if center else weight.new_empty(0)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, residual, weight, bias, _, ctx.center = inputs
    _, total, mean, rstd = output
    ctx.residual, ctx.bias = residual is not None, bias is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)


def _differentiate(ctx, dy, dtotal, _mean, _rstd):  # type: ignore[no-untyped-def]
    dt, dw, db = torch.ops.partita.norm_backward(dy, *ctx.saved_tensors, ctx.center)
    if ctx.residual:
        dt = dt + dtotal
    return dt, dt if ctx.residual else None, dw, db if ctx.bias else None, None, None


_norm.register_autograd(_differentiate, setup_context=_save)
