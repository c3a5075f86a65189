"""Rotary positions (Su et al. 2021): pairs (i, i + D/2) of a head turned by position-dependent angles. Backward turns the other way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel, power_of_2
from partita_kernels.rows import wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

TILE = 2048  # pairs of a Triton program


def rope_angles(positions: Tensor, size: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [..., size/2], for positions [...] and heads of `size` elements (even)."""
    rates = base ** (-torch.arange(size // 2, device=positions.device, dtype=torch.float32) * 2 / size)
    turns = positions.to(torch.float32)[..., None] * rates
    return turns.cos(), turns.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] with D even, any strides; cos, sin float32 [T, D/2] or [B, T, D/2], which get no gradient. Like x.

    Raises ValueError where shapes don't fit.
    """
    b, _, t, d = x.shape
    if cos.shape != sin.shape or tuple(cos.shape) not in ((t, d // 2), (b, t, d // 2)) or d % 2:
        raise ValueError(f"rope: x {tuple(x.shape)} with cos {tuple(cos.shape)} and sin {tuple(sin.shape)}")
    return torch.ops.partita.rope(x, cos, sin, False)


def reference(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Plain torch."""
    c, s = (t[:, None] if t.dim() == 3 else t for t in (cos, sin))
    s = -s if back else s
    a, z = wide(x).chunk(2, dim=-1)
    return torch.empty_like(x).copy_(torch.cat([a * c - z * s, z * c + a * s], dim=-1))


@kernel
def _kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, heads, time, half, xb, xh, xt, yb, yh, yt, angle_batch,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token for each program, HEADS heads of it."""
    token = tl.program_id(0).to(tl.int64)
    b = token // time
    t = token % time
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    inside = (h < heads) & (i < half)
    angle = b * angle_batch + t * half + i
    cos = tl.load(cos_ptr + angle, mask=i < half, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=i < half, other=0.0)
    if BACK:
        sin = -sin
    x_at = x_ptr + b * xb + h.to(tl.int64) * xh + t * xt + i
    y_at = y_ptr + b * yb + h.to(tl.int64) * yh + t * yt + i
    a = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(x_at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at, (a * cos - z * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_at + half, (z * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)


def triton(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """As `reference`."""
    if x.dtype == torch.float64:
        return reference(x, cos, sin, back)
    x = x if x.stride(3) == 1 else x.contiguous()
    y, (b, h, t, d) = torch.empty_like(x), x.shape
    if x.numel():
        half = power_of_2(d // 2)
        heads = min(power_of_2(h), max(1, TILE // half))
        strides = (*x.stride()[:3], *y.stride()[:3], cos.stride(0) if cos.dim() == 3 else 0)
        _kernel[(b * t, cdiv(h, heads))](x, cos, sin, y, h, t, d // 2, *strides, BACK=back, HEADS=heads, HALF=half)
    return y


def cpu(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """As `reference`, in one pass."""
    library = native.load("layers") if x.dtype in native.DTYPES else None
    if library is None:
        return reference(x, cos, sin, back)
    x = x if x.stride(3) == 1 else x.contiguous()
    y, (b, h, t, d), p = torch.empty_like(x), x.shape, native.pointer
    sizes = map(native.integer, (b, h, t, d // 2))
    angle_batch = native.integer(cos.stride(0) if cos.dim() == 3 else 0)
    library.rope(
        p(x), p(cos), p(sin), p(y), *sizes, native.integers(x.stride()[:3]), native.integers(y.stride()[:3]), angle_batch,
        int(back), native.DTYPES[x.dtype], native.threads(),
    )  # fmt: skip
    return y


ROPE = Operation("rope", reference, triton, cpu)


@torch.library.custom_op("partita::rope", mutates_args=(), schema="(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor")
def _rope(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return ROPE.on(x.device)(x, cos.contiguous(), sin.contiguous(), back)


@_rope.register_fake
def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return torch.empty_like(x if x.stride(3) == 1 else x.contiguous())


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    cos, sin = ctx.saved_tensors
    return torch.ops.partita.rope(dy, cos, sin, not ctx.back), None, None, None


_rope.register_autograd(_differentiate, setup_context=_save)
