"""How updates store numbers in fewer bits: stochastic rounding to bfloat16, and 8-bit floats with a scale for each block.

Random bits are a hash of seed, step, the element's place and what is stored there (Wellons 2018, lowbias32), so they are the same on every
device and for every cut of a buffer. Stochastic rounding (Gupta et al. 2015) adds them below the last bit that is kept: the expected
value is exact, so small updates aren't lost.

8-bit states (in the spirit of Dettmers et al. 2022, with a format that is computed instead of looked up): x / max|x of the block| as a
float with 3 bits of fraction. First moments: sign and 4 bits of exponent, down to 2^-16; second moments: 5 bits of exponent, no sign,
down to 2^-32, and what isn't zero never becomes zero. Code 0 is 0; a block with a NaN or Inf comes back as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from partita_kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

BLOCK8 = 256  # elements with one scale
TINY = 1e-37  # blocks whose largest element is below it become zeros: 1 / max must be finite
ONE = 0x3F800000 >> 20  # 1.0 with 3 bits of fraction
MASK = 0xFFFFFFFF
MULTIPLY = (0x7FEB352D, 0x846CA68B)
HIGH, STREAM = 0x9E3779B9, 0x85EBCA6B


class Rounding(NamedTuple):
    """Where the random bits of an update come from.

    seed, step: of the run and of the update. starts: for each range the number of its first element in the whole that is cut into
    ranges, so that the cut changes nothing.
    """

    seed: int
    step: int
    starts: Sequence[int]

    def keys(self) -> tuple[int, int]:
        """Two 32-bit words."""
        first = mix_int((self.seed ^ (self.seed >> 32)) & MASK)
        return mix_int(first ^ (self.step & MASK)), mix_int((first + HIGH + self.step) & MASK)


def mix_int(x: int) -> int:
    """The hash of one 32-bit word."""
    x ^= x >> 16
    x = x * MULTIPLY[0] & MASK
    x ^= x >> 15
    x = x * MULTIPLY[1] & MASK
    return x ^ (x >> 16)


# ---- plain torch


def _mix(x: Tensor) -> Tensor:
    """`mix_int` of int64 that hold 32-bit words; products wrap, which leaves the low word right."""
    x = x ^ (x >> 16)
    x = (x * MULTIPLY[0]) & MASK
    x = x ^ (x >> 15)
    x = (x * MULTIPLY[1]) & MASK
    return x ^ (x >> 16)


def random_bits(start: int, count: int, keys: tuple[int, int], stream: int, device: torch.device) -> Tensor:
    """int64 [count], 32 random bits for each element from number `start`. stream: 0 weights, 1 and 2 states."""
    at = torch.arange(start, start + count, device=device)
    return _mix(_mix((at & MASK) ^ keys[0]) ^ (((at >> 32) * HIGH + keys[1] + stream * STREAM) & MASK))


def stochastic_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bfloat16, up or down with the probability that makes the expected value x. bits: from `random_bits`."""
    raw = x.contiguous().view(torch.int32).long() & MASK
    moved = (raw + (bits & 0xFFFF)) & ~0xFFFF & MASK
    signed = torch.where(moved >> 31 != 0, moved - (1 << 32), moved).to(torch.int32)
    return torch.where(x.isfinite(), signed.view(torch.float32), x).to(torch.bfloat16)


def encode8(x: Tensor, codes: Tensor, scales: Tensor, signed: bool, bits: Tensor | None, block: int = BLOCK8) -> None:
    """float32 [n] -> uint8 codes [n] and float32 scales [ceil(n / block)]. bits: None rounds to nearest, ties to even."""
    n, top = x.numel(), 127 if signed else 255
    rows = torch.nn.functional.pad(x, (0, -n % block)).view(-1, block)
    peak = rows.abs().amax(1)
    inverse = torch.where(peak > TINY, 1.0 / peak, 0.0)
    t = (rows * inverse[:, None]).view(-1)[:n].nan_to_num(0.0, 0.0, 0.0)
    raw = t.abs().view(torch.int32)
    add = 0x7FFFF + ((raw >> 20) & 1) if bits is None else (bits & 0xFFFFF).to(torch.int32)
    code = (((raw + add) >> 20) - (ONE - top)).clamp(0, top)
    code = code + 128 * (t < 0) * (code > 0) if signed else torch.where(t > 0, code.clamp(min=1), 0)
    codes.copy_(code)
    scales.copy_(torch.where(rows.isfinite().all(1), peak, float("nan")))


def decode8(codes: Tensor, scales: Tensor, signed: bool, block: int = BLOCK8) -> Tensor:
    """What `encode8` stored, float32 [n]."""
    code = codes.to(torch.int32)
    size = code & 127 if signed else code
    value = torch.where(size > 0, (size + (ONE - (127 if signed else 255))) << 20, 0).view(torch.float32)
    value = torch.where(code > 127, -value, value) if signed else value
    return value * scales.repeat_interleave(block)[: codes.numel()]


# ---- Triton


@kernel
def _mix_lanes(x):
    x = x ^ (x >> 16)
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)
    x = x ^ (x >> 15)
    x = tl.mul(x, 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@kernel
def random_lanes(at, key0, key1, STREAM: tl.constexpr):
    """`random_bits` as uint32 for int64 numbers `at`; keys are uint32."""
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    high = ((at >> 32) & 0xFFFFFFFF).to(tl.uint32)
    tail = tl.add(tl.mul(high, 0x9E3779B9, sanitize_overflow=False), key1, sanitize_overflow=False)
    tail = tl.add(tail, (STREAM * 0x85EBCA6B) & 0xFFFFFFFF, sanitize_overflow=False)
    return _mix_lanes(_mix_lanes(low ^ key0) ^ tail)


@kernel
def stochastic_lanes(x, bits):
    """`stochastic_bfloat16`, still float32."""
    raw = x.to(tl.uint32, bitcast=True)
    moved = tl.add(raw, bits & 0xFFFF, sanitize_overflow=False) & 0xFFFF0000
    finite = (raw & 0x7F800000) != 0x7F800000
    return tl.where(finite, moved.to(tl.float32, bitcast=True), x)


@kernel
def decode8_lanes(codes, scales, SIGNED: tl.constexpr):
    """Codes [B] and each one's scale [B] -> float32 [B]."""
    code = codes.to(tl.int32)
    if SIGNED:
        size = code & 127
        value = tl.where(size > 0, (size + 889) << 20, 0).to(tl.float32, bitcast=True)
        return tl.where(code > 127, -value, value) * scales
    else:
        return tl.where(code > 0, (code + 761) << 20, 0).to(tl.float32, bitcast=True) * scales


@kernel
def encode8_lanes(x, bits, inside, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, BLOCK8: tl.constexpr):
    """x [BLOCK] -> (codes uint8 [BLOCK], scales float32 [BLOCK / BLOCK8])."""
    rows = tl.reshape(tl.where(inside, x, 0.0), (BLOCK // BLOCK8, BLOCK8))
    peak = tl.max(tl.abs(rows), 1)
    usable = peak > 1e-37
    inverse = tl.where(usable, 1.0 / tl.where(usable, peak, 1.0), 0.0)
    t = tl.reshape(rows * inverse[:, None], (BLOCK,))
    t = tl.where(tl.abs(t) < 2.0, t, 0.0)
    raw = tl.abs(t).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        raw += (bits & 0xFFFFF).to(tl.int32)
    else:
        raw += 0x7FFFF + ((raw >> 20) & 1)
    if SIGNED:
        code = tl.minimum(tl.maximum((raw >> 20) - 889, 0), 127)
        code = tl.where((t < 0) & (code > 0), code + 128, code)
    else:
        code = tl.minimum(tl.maximum((raw >> 20) - 761, 0), 255)
        code = tl.where(t > 0, tl.maximum(code, 1), 0)
    return code.to(tl.uint8), peak + tl.sum(rows * 0.0, 1)
