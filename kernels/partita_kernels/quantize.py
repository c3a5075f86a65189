"""Blocks of a flat tensor in 8 or 4 bits with a float32 scale each, for wire and storage: int8, int4, fp8_e4m3, fp8_e5m2.

scale = max|x| / top; codes are x / scale rounded to nearest, ties to even: integers up to top (127; 7), or 8-bit floats (Micikevicius et al. 2022)
up to 448 (4 bits of exponent, 3 of fraction) or 57344 (5 and 2). The error of integers is at most scale / 2, of floats half a step of the last
fraction bit. A block with a NaN or Inf comes back as NaN, a block whose largest element is below 1e-36 as zeros.
Two int4 share a byte: the element of even number is in its lower half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel, language_type
from partita_kernels.rows import wide
from partita_kernels.table import HEAD, address, make_table, range_of

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor
Tensors = Sequence[Tensor]

TINY = 1e-36  # top / max|x| must be finite
TILE = 4096  # elements of a Triton program


class Format(NamedTuple):
    """code: in C++. top: largest value. fraction: bits after the point of a float, 0 for integers. bias: of its exponent."""

    code: int
    dtype: torch.dtype
    per_byte: int
    top: float
    fraction: int = 0
    bias: int = 0


FORMATS = {
    "int8": Format(0, torch.int8, 1, 127.0),
    "int4": Format(1, torch.uint8, 2, 7.0),
    "fp8_e4m3": Format(2, torch.float8_e4m3fn, 1, 448.0, 3, 7),
    "fp8_e5m2": Format(3, torch.float8_e5m2, 1, 57344.0, 2, 15),
}


def quantize_blocks(x: Tensor, format: str = "int8", block: int = 256) -> tuple[Tensor, Tensor]:
    """Codes [n, or (n + 1) // 2 bytes of int4] and float32 scales [ceil(n / block)] of a contiguous 1-D float tensor.

    block: a power of two from 16 to 4096. Raises ValueError for other shapes, blocks and formats.
    """
    f = find(format)
    codes = torch.empty(cdiv(x.numel(), f.per_byte), dtype=f.dtype, device=x.device)
    scales = torch.empty(cdiv(x.numel(), block) if block > 0 else 0, dtype=torch.float32, device=x.device)
    quantize_blocks_([x], [codes], [scales], format, block)
    return codes, scales


def quantize_blocks_(xs: Tensors, codes: Tensors, scales: Tensors, format: str = "int8", block: int = 256) -> None:
    """`quantize_blocks` of several tensors of one dtype and device in one launch, into memory that is there."""
    f = find(format)
    _check(xs, codes, scales, f, block)
    live = [(x.detach(), c, s) for x, c, s in zip(xs, codes, scales) if x.numel()]
    if live:
        QUANTIZE.on(xs[0].device)(live, f, block)


def dequantize_blocks_(
    codes: Tensors, scales: Tensors, outs: Tensors, format: str = "int8", block: int = 256, add: bool = False
) -> None:
    """Write value x scale into `outs`, contiguous 1-D float tensors of one dtype, in one launch; add: to what is there, in float32."""
    f = find(format)
    _check(outs, codes, scales, f, block)
    live = [(o, c, s) for o, c, s in zip(outs, codes, scales) if o.numel()]
    if live:
        DEQUANTIZE.on(outs[0].device)(live, f, block, add)


def quantize_int8(x: Tensor, block: int = 256) -> tuple[Tensor, Tensor]:
    """`quantize_blocks` in format int8."""
    return quantize_blocks(x, "int8", block)


def dequantize_int8(q: Tensor, scales: Tensor, out: Tensor, block: int = 256, add: bool = False) -> Tensor:
    """`dequantize_blocks_` of one int8 tensor. Returns out."""
    dequantize_blocks_([q], [scales], [out], "int8", block, add)
    return out


def find(format: str) -> Format:
    """Raises ValueError with the names there are."""
    if format not in FORMATS:
        raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    return FORMATS[format]


def check_flat(x: Tensor, block: int) -> None:
    """Raises ValueError for what the kernels don't take."""
    if x.dim() != 1 or not x.is_contiguous() or not x.is_floating_point():
        raise ValueError(f"a contiguous 1-D float tensor is needed, not {x.dtype} {tuple(x.shape)}")
    if block & (block - 1) or not 16 <= block <= TILE:
        raise ValueError(f"block={block}: a power of two from 16 to {TILE} is needed")


def _check(xs: Tensors, codes: Tensors, scales: Tensors, f: Format, block: int) -> None:
    if not len(xs) == len(codes) == len(scales):
        raise ValueError(f"{len(xs)} tensors with {len(codes)} lists of codes and {len(scales)} of scales")
    for x, c, s in zip(xs, codes, scales):
        check_flat(x, block)
        if x.dtype != xs[0].dtype or c.dtype != f.dtype:
            raise ValueError(f"codes in {c.dtype} for {f.dtype}, or tensors in {x.dtype} and {xs[0].dtype}: one dtype at a time")
        if c.numel() != cdiv(x.numel(), f.per_byte) or s.numel() != cdiv(x.numel(), block):
            raise ValueError(f"{c.numel()} codes and {s.numel()} scales don't fit {x.numel()} elements in blocks of {block}")


def in_blocks(x: Tensor, block: int) -> Tensor:
    """[blocks, block] in at least float32, zeros after the end."""
    pad = -x.numel() % block
    return torch.nn.functional.pad(wide(x), (0, pad)).view(-1, block)


# ---- plain torch

Live = list[tuple[Tensor, Tensor, Tensor]]


def reference(live: Live, f: Format, block: int) -> None:
    """Fill codes and scales of (x, codes, scales)."""
    for x, codes, scales in live:
        v = in_blocks(x, block).float()
        peak = v.abs().amax(1)
        inverse = torch.where(peak > TINY, f.top / peak, 0.0)
        t = (v * inverse[:, None]).nan_to_num(0.0, 0.0, 0.0).clamp(-f.top, f.top).view(-1)[: x.numel()]
        if f.fraction:
            codes.copy_(t.to(f.dtype))
        elif f.per_byte == 1:
            codes.copy_(t.round())
        else:
            q = in_blocks(t.round(), 2).to(torch.int32) & 15
            codes.copy_(q[:, 0] | q[:, 1] << 4)
        scales.copy_(torch.where(v.isfinite().all(1), peak / f.top, float("nan")))


def reference_back(live: Live, f: Format, block: int, add: bool) -> None:
    """Fill the outputs of (out, codes, scales)."""
    for out, codes, scales in live:
        if f.per_byte == 2:
            nibbles = torch.stack([codes & 15, codes >> 4], 1).view(-1)[: out.numel()].to(torch.int32)
            v = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
        else:
            v = codes.float()
        v = (in_blocks(v, block) * scales[:, None]).view(-1)[: out.numel()]
        out.copy_(wide(out) + v if add else v)


# ---- Triton


@kernel
def _encode(t, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """t within the format -> its code, int32. By integers: not every device and version converts to 8-bit floats."""
    if FRACTION == 0:
        magic = 12582912.0  # 1.5 * 2^23: adding it rounds to nearest, ties to even
        return ((t + magic) - magic).to(tl.int32)
    else:
        size = tl.abs(t)
        raw = size.to(tl.int32, bitcast=True)
        drop: tl.constexpr = 23 - FRACTION
        normal = ((raw + (2 ** (drop - 1) - 1) + ((raw >> drop) & 1)) >> drop) - ((127 - BIAS) * 2**FRACTION)
        magic = 2.0 ** (23 + 1 - BIAS - FRACTION)  # its last bit is the format's smallest step: the addition rounds
        denormal = (size + magic).to(tl.int32, bitcast=True) - (127 + 24 - BIAS - FRACTION) * 8388608
        code = tl.where(size < 2.0 ** (1 - BIAS), denormal, normal)
        return code | tl.where(t < 0, 128, 0)


@kernel
def _decode(code, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """int32 codes -> float32."""
    if FRACTION == 0:
        return code.to(tl.float32)
    else:
        size = code & 127
        normal = ((size + (127 - BIAS) * 2**FRACTION) * 2 ** (23 - FRACTION)).to(tl.float32, bitcast=True)
        value = tl.where(size < 2**FRACTION, size.to(tl.float32) * 2.0 ** (1 - BIAS - FRACTION), normal)
        return tl.where(code > 127, -value, value)


@kernel
def _tile(left, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, elements, are they inside?) of a program: [ROWS, BLOCK / 2, 2], so that neighbours can share a byte."""
    row = tl.arange(0, ROWS)
    lane = row[:, None, None] * BLOCK + tl.arange(0, BLOCK // 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    return row, lane, lane < left


@kernel
def _quantize(
    rows_ptr, owners_ptr, TOP: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, X: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table, _, first, n = range_of(rows_ptr, owners_ptr, 6, ROWS * BLOCK)
    row, lane, inside = _tile(n - first, ROWS, BLOCK)
    x = tl.load(address(table, 0, X, ALIGNED) + first + lane, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.max(tl.abs(x), 2), 1)
    inverse = tl.where(peak > 1e-36, TOP / tl.where(peak > 1e-36, peak, 1.0), 0.0)
    t = x * inverse[:, None, None]
    t = tl.where(t == t, t, 0.0)
    t = tl.minimum(tl.maximum(t, -TOP), TOP)
    code = _encode(t, FRACTION, BIAS)
    if PACKED:
        place = tl.arange(0, 2)[None, None, :]
        byte = tl.sum(tl.where(inside, code & 15, 0) << (4 * place), 2)
        at = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(address(table, 1, tl.uint8, ALIGNED) + first // 2 + at, byte.to(tl.uint8), mask=at * 2 < n - first)
    else:
        tl.store(address(table, 1, tl.uint8, ALIGNED) + first + lane, (code & 255).to(tl.uint8), mask=inside)
    # 0 x is NaN for NaN and Inf, which a maximum may have lost.
    scale = peak / TOP + tl.sum(tl.sum(x * 0.0, 2), 1)
    tl.store(address(table, 2, tl.float32, False) + first // BLOCK + row, scale, mask=row * BLOCK < n - first)


@kernel
def _dequantize(
    rows_ptr, owners_ptr, FRACTION: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, X: tl.constexpr, ADD: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table, _, first, n = range_of(rows_ptr, owners_ptr, 6, ROWS * BLOCK)
    row, lane, inside = _tile(n - first, ROWS, BLOCK)
    scale = tl.load(address(table, 2, tl.float32, False) + first // BLOCK + row, mask=row * BLOCK < n - first, other=0.0)
    if PACKED:
        byte = tl.load(address(table, 1, tl.uint8, ALIGNED) + (first + lane) // 2, mask=inside, other=0).to(tl.int32)
        code = (byte >> (4 * tl.arange(0, 2)[None, None, :])) & 15
        code = tl.where(code > 7, code - 16, code)
    else:
        code = tl.load(address(table, 1, tl.uint8, ALIGNED) + first + lane, mask=inside, other=0).to(tl.int32)
        if FRACTION == 0:
            code = tl.where(code > 127, code - 256, code)
    v = _decode(code, FRACTION, BIAS) * scale[:, None, None]
    out = address(table, 0, X, ALIGNED) + first + lane
    if ADD:
        v += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, v.to(X), mask=inside)


def triton(live: Live, f: Format, block: int) -> None:
    """As `reference`."""
    table, more = _arguments(live, f, block)
    _quantize[(table.programs,)](table.rows, table.owners, TOP=f.top, **more)


def triton_back(live: Live, f: Format, block: int, add: bool) -> None:
    """As `reference_back`."""
    table, more = _arguments(live, f, block)
    _dequantize[(table.programs,)](table.rows, table.owners, ADD=add, **more)


def _arguments(live: Live, f: Format, block: int):  # type: ignore[no-untyped-def]
    table = make_table(live, TILE)
    assert table.rows.shape[1] == HEAD + 3
    constants = {"FRACTION": f.fraction, "BIAS": f.bias, "PACKED": f.per_byte == 2, "X": language_type(live[0][0].dtype)}
    return table, {**constants, "ALIGNED": table.aligned, "ROWS": TILE // block, "BLOCK": block}


# ---- CPU


def cpu(live: Live, f: Format, block: int) -> None:
    """As `reference`, a block read from memory once."""
    library = native.load("wire") if live[0][0].dtype in native.DTYPES else None
    if library is None:
        return reference(live, f, block)
    library.quantize(*_native(live, f, block), native.DTYPES[live[0][0].dtype], native.threads())
    return None


def cpu_back(live: Live, f: Format, block: int, add: bool) -> None:
    """As `reference_back`, in one pass."""
    library = native.load("wire") if live[0][0].dtype in native.DTYPES else None
    if library is None:
        return reference_back(live, f, block, add)
    library.dequantize(*_native(live, f, block), int(add), native.DTYPES[live[0][0].dtype], native.threads())
    return None


def _native(live: Live, f: Format, block: int):  # type: ignore[no-untyped-def]
    xs, codes, scales = (list(group) for group in zip(*live))
    p = native.pointers
    return native.integer(len(xs)), native.lengths(xs), p(xs), p(codes), p(scales), native.integer(block), f.code


QUANTIZE = Operation("quantize", reference, triton, cpu)
DEQUANTIZE = Operation("dequantize", reference_back, triton_back, cpu_back)
