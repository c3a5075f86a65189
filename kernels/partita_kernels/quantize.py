"""int8 with a float32 scale for each block of a flat tensor: 1 byte and 4/block for an element.

scale = max|x| / 127, q = x / scale rounded to nearest, ties to even: the error is at most scale / 2. A block with a NaN or Inf comes
back as NaN, a block whose largest element is below 1e-36 as zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel
from partita_kernels.rows import wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

TINY = 1e-36  # 127 / max|x| must be finite
TILE = 4096  # elements of a Triton program


def quantize_int8(x: Tensor, block: int = 256) -> tuple[Tensor, Tensor]:
    """int8 [n] and float32 scales [ceil(n / block)] of a contiguous 1-D float tensor; block: a power of two from 16 to 4096.

    Raises ValueError for other shapes and blocks.
    """
    check_flat(x, block)
    q = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
    scales = torch.empty(cdiv(x.numel(), block), dtype=torch.float32, device=x.device)
    if x.numel():
        QUANTIZE.on(x.device)(x.detach(), q, scales, block)
    return q, scales


def dequantize_int8(q: Tensor, scales: Tensor, out: Tensor, block: int = 256, add: bool = False) -> Tensor:
    """Write q * scale into `out`, a contiguous 1-D float tensor as long as q; add: to what is there, in float32. Returns out."""
    check_flat(out, block)
    if q.shape != out.shape or scales.numel() != cdiv(q.numel(), block):
        raise ValueError(f"{q.numel()} elements and {scales.numel()} scales don't fit {out.numel()} in blocks of {block}")
    if q.numel():
        DEQUANTIZE.on(q.device)(q, scales, out, block, add)
    return out


def check_flat(x: Tensor, block: int) -> None:
    """Raises ValueError for what the kernels don't take."""
    if x.dim() != 1 or not x.is_contiguous() or not x.is_floating_point():
        raise ValueError(f"a contiguous 1-D float tensor is needed, not {x.dtype} {tuple(x.shape)}")
    if block & (block - 1) or not 16 <= block <= TILE:
        raise ValueError(f"block={block}: a power of two from 16 to {TILE} is needed")


def in_blocks(x: Tensor, block: int) -> Tensor:
    """[blocks, block] in at least float32, zeros after the end."""
    pad = -x.numel() % block
    return torch.nn.functional.pad(wide(x), (0, pad)).view(-1, block)


# ---- plain torch


def reference(x: Tensor, q: Tensor, scales: Tensor, block: int) -> None:
    """Fill q and scales."""
    v = in_blocks(x, block).float()
    peak = v.abs().amax(1)
    inverse = torch.where(peak > TINY, 127.0 / peak, 0.0)
    rounded = (v * inverse[:, None]).round().clamp(-127, 127).nan_to_num(0.0)
    q.copy_(rounded.view(-1)[: x.numel()])
    scales.copy_(torch.where(v.isfinite().all(1), peak / 127.0, float("nan")))


def reference_back(q: Tensor, scales: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Fill out."""
    v = (in_blocks(q.float(), block) * scales[:, None]).view(-1)[: q.numel()]
    out.copy_(wide(out) + v if add else v)


# ---- Triton


@kernel
def _quantize(x_ptr, q_ptr, s_ptr, n, blocks, TINY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 1)
    inverse = tl.where(peak > TINY, 127.0 / tl.where(peak > TINY, peak, 1.0), 0.0)
    t = x * inverse[:, None]
    t = tl.where(t == t, t, 0.0)
    t = tl.minimum(tl.maximum(t, -127.0), 127.0)
    t = (t + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to nearest, ties to even
    tl.store(q_ptr + at, t.to(tl.int8), mask=at < n)
    # 0 x is NaN for NaN and Inf, which a maximum may have lost.
    tl.store(s_ptr + row, peak / 127.0 + tl.sum(x * 0.0, 1), mask=row < blocks)


@kernel
def _dequantize(q_ptr, s_ptr, out_ptr, n, blocks, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(s_ptr + row, mask=row < blocks, other=0.0)
    v = tl.load(q_ptr + at, mask=at < n, other=0).to(tl.float32) * scale[:, None]
    if ADD:
        v += tl.load(out_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=at < n)


def triton(x: Tensor, q: Tensor, scales: Tensor, block: int) -> None:
    """As `reference`."""
    rows = TILE // block
    _quantize[(cdiv(scales.numel(), rows),)](x, q, scales, x.numel(), scales.numel(), TINY=TINY, ROWS=rows, BLOCK=block)


def triton_back(q: Tensor, scales: Tensor, out: Tensor, block: int, add: bool) -> None:
    """As `reference_back`."""
    rows = TILE // block
    _dequantize[(cdiv(scales.numel(), rows),)](q, scales, out, q.numel(), scales.numel(), ADD=add, ROWS=rows, BLOCK=block)


# ---- CPU


def cpu(x: Tensor, q: Tensor, scales: Tensor, block: int) -> None:
    """As `reference`, in one pass."""
    library = native.load("wire") if x.dtype in native.DTYPES else None
    if library is None:
        return reference(x, q, scales, block)
    p, i = native.pointer, native.integer
    library.quantize(p(x), p(q), p(scales), i(x.numel()), i(block), native.DTYPES[x.dtype], native.threads())
    return None


def cpu_back(q: Tensor, scales: Tensor, out: Tensor, block: int, add: bool) -> None:
    """As `reference_back`, in one pass."""
    library = native.load("wire") if out.dtype in native.DTYPES else None
    if library is None:
        return reference_back(q, scales, out, block, add)
    p, i = native.pointer, native.integer
    library.dequantize(p(q), p(scales), p(out), i(q.numel()), i(block), int(add), native.DTYPES[out.dtype], native.threads())
    return None


QUANTIZE = Operation("quantize_int8", reference, triton, cpu)
DEQUANTIZE = Operation("dequantize_int8", reference_back, triton_back, cpu_back)
