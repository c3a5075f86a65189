"""One bit for each element and a float32 scale for each block, with error feedback (Seide et al. 2014; Tang et al. 2021, 1-bit Adam).

v = x + error; scale = avg|v| of a block; bit = v >= 0; error = v - (scale or -scale). Bit i of byte j is element 8 j + i.
A block with a NaN or Inf has a scale that isn't finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel
from partita_kernels.quantize import check_flat, in_blocks
from partita_kernels.rows import wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor


def pack_signs(x: Tensor, error: Tensor | None = None, block: int = 1024) -> tuple[Tensor, Tensor]:
    """uint8 bits [ceil(n / 8)] and float32 scales [ceil(n / block)] of a contiguous 1-D float tensor.

    error: float32 [n], added before and replaced by what was lost. block: a power of two from 16 to 4096.
    Raises ValueError for other shapes and blocks.
    """
    check_flat(x, block)
    if error is not None and (error.shape != x.shape or error.dtype != torch.float32 or not error.is_contiguous()):
        raise ValueError(f"error must be contiguous float32 of {x.numel()} elements, not {error.dtype} {tuple(error.shape)}")
    bits = torch.empty(cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)
    scales = torch.empty(cdiv(x.numel(), block), dtype=torch.float32, device=x.device)
    if x.numel():
        PACK.on(x.device)(x.detach(), error, bits, scales, block)
    return bits, scales


def unpack_signs(bits: Tensor, scales: Tensor, out: Tensor, block: int = 1024, add: bool = False) -> Tensor:
    """Write scale or -scale into `out`, a contiguous 1-D float tensor; add: to what is there, in float32. Returns out."""
    check_flat(out, block)
    if bits.numel() != cdiv(out.numel(), 8) or scales.numel() != cdiv(out.numel(), block):
        raise ValueError(
            f"{bits.numel()} bytes and {scales.numel()} scales don't fit {out.numel()} elements in blocks of {block}"
        )
    if out.numel():
        UNPACK.on(out.device)(bits, scales, out, block, add)
    return out


# ---- plain torch


def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, device=device, dtype=torch.int32)


def reference(x: Tensor, error: Tensor | None, bits: Tensor, scales: Tensor, block: int) -> None:
    """Fill bits, scales and error."""
    n = x.numel()
    v = wide(x).float() if error is None else wide(x).float() + error
    rows = in_blocks(v, block)
    counts = torch.full_like(scales, block)
    counts[-1] = n - (scales.numel() - 1) * block
    scales.copy_(rows.abs().sum(1) / counts)
    set_bits = (in_blocks(v, 8) >= 0).to(torch.int32)
    bits.copy_((set_bits * _powers(x.device)).sum(1))
    if n % 8:
        bits[-1] &= (1 << n % 8) - 1  # bits after the end are 0
    if error is not None:
        each = scales.repeat_interleave(block)[:n]
        error.copy_(v - torch.where(v >= 0, each, -each))


def reference_back(bits: Tensor, scales: Tensor, out: Tensor, block: int, add: bool) -> None:
    """Fill out."""
    n = out.numel()
    up = ((bits[:, None].to(torch.int32) & _powers(bits.device)) != 0).view(-1)[:n]
    each = scales.repeat_interleave(block)[:n]
    v = torch.where(up, each, -each)
    out.copy_(wide(out) + v if add else v)


# ---- Triton


@kernel
def _pack(x_ptr, e_ptr, bits_ptr, s_ptr, n, ERROR: tl.constexpr, BLOCK: tl.constexpr):
    """One block for each program."""
    block = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)[None, :]
    at = block * BLOCK + byte[:, None] * 8 + bit
    inside = at < n
    v = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ERROR:
        v += tl.load(e_ptr + at, mask=inside, other=0.0)
    count = tl.minimum(n - block * BLOCK, BLOCK).to(tl.float32)
    scale = tl.sum(tl.sum(tl.abs(v), 1), 0) / count
    up = v >= 0
    packed = tl.sum(tl.where(up & inside, 1, 0) << bit, 1)
    tl.store(bits_ptr + block * (BLOCK // 8) + byte, packed.to(tl.uint8), mask=block * BLOCK + byte * 8 < n)
    tl.store(s_ptr + block, scale)
    if ERROR:
        tl.store(e_ptr + at, v - tl.where(up, scale, -scale), mask=inside)


@kernel
def _unpack(bits_ptr, s_ptr, out_ptr, n, ADD: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)[None, :]
    at = block * BLOCK + byte[:, None] * 8 + bit
    packed = tl.load(bits_ptr + block * (BLOCK // 8) + byte, mask=block * BLOCK + byte * 8 < n, other=0).to(tl.int32)
    scale = tl.load(s_ptr + block)
    v = tl.where(((packed[:, None] >> bit) & 1) != 0, scale, -scale)
    if ADD:
        v += tl.load(out_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=at < n)


def triton(x: Tensor, error: Tensor | None, bits: Tensor, scales: Tensor, block: int) -> None:
    """As `reference`."""
    e = scales if error is None else error
    _pack[(scales.numel(),)](x, e, bits, scales, x.numel(), ERROR=error is not None, BLOCK=block)


def triton_back(bits: Tensor, scales: Tensor, out: Tensor, block: int, add: bool) -> None:
    """As `reference_back`."""
    _unpack[(scales.numel(),)](bits, scales, out, out.numel(), ADD=add, BLOCK=block)


# ---- CPU


def cpu(x: Tensor, error: Tensor | None, bits: Tensor, scales: Tensor, block: int) -> None:
    """As `reference`, blocks kept in the cache."""
    library = native.load("wire") if x.dtype in native.DTYPES else None
    if library is None:
        return reference(x, error, bits, scales, block)
    p, i = native.pointer, native.integer
    library.pack_signs(p(x), p(error), p(bits), p(scales), i(x.numel()), i(block), native.DTYPES[x.dtype], native.threads())
    return None


def cpu_back(bits: Tensor, scales: Tensor, out: Tensor, block: int, add: bool) -> None:
    """As `reference_back`."""
    library = native.load("wire") if out.dtype in native.DTYPES else None
    if library is None:
        return reference_back(bits, scales, out, block, add)
    p, i = native.pointer, native.integer
    library.unpack_signs(
        p(bits), p(scales), p(out), i(out.numel()), i(block), int(add), native.DTYPES[out.dtype], native.threads()
    )
    return None


PACK = Operation("pack_signs", reference, triton, cpu)
UNPACK = Operation("unpack_signs", reference_back, triton_back, cpu_back)
