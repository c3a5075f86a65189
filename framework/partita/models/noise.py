"""Random numbers from a counter: what dropout drops depends on seed, step, layer, sample, token and channel, never on the layout.

A torch generator would give other values for another split of the batch, and would have to be saved and replayed. Here each
element hashes its own coordinates, so recomputation, resuming and any number of ranks see the same zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_M64 = (1 << 64) - 1
# Odd multipliers with good avalanche behaviour in 32 bits (Wellons, "Prospecting for hash functions", 2018)
_A32, _B32 = 0x7FEB352D, 0x846CA68B


def _signed(value: int, bits: int) -> int:
    """The integer of `bits` bits as torch's signed types hold it."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_C64 = _signed(_GOLDEN, 64)
_D64, _E64 = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_C32, _B32S = _signed(0x9E3779B1, 32), _signed(_B32, 32)


@dataclass(frozen=True)
class Noise:
    """Where the random numbers of one micro-batch lie.

    seed: of the run. step: of the update. sample: int64 [B], the global number of each sequence. columns: int64 [T], which tokens
    of their sequence the micro-batch holds, where it holds a part; None: all from the first.
    """

    seed: int
    step: int
    sample: torch.Tensor
    columns: torch.Tensor | None = None


def dropout(x: torch.Tensor, p: float, noise: Noise | None, layer: int) -> torch.Tensor:
    """x [B, T, C] with each element zero with probability p, the others times 1 / (1 - p). Without noise or elements, or with p 0, x itself.

    layer: a number of its own for each place in the model.
    """
    if noise is None or p == 0.0 or not x.numel():
        return x
    return x.masked_fill(dropped(x, p, noise, layer), 0.0) * (1.0 / (1.0 - p))


@torch.no_grad()
def dropped(x: torch.Tensor, p: float, noise: Noise, layer: int) -> torch.Tensor:
    """Bool [B, T, C]: which elements of x are dropped. p is rounded to a multiple of 2^-32."""
    return _element_hashes(x, noise, layer) < round(p * 2**32) - 2**31


@torch.no_grad()
def uniform(x: torch.Tensor, noise: Noise, layer: int) -> torch.Tensor:
    """float32 [B, T, C]: a number for each element of x, drawn evenly from -1 to 1. layer: as in `dropout`.

    A model that draws outside of dropout says so by a true attribute `partita_noise`: else there is noise only where `model.dropout` is not zero.
    """
    return _element_hashes(x, noise, layer).float() * 2.0**-31


def _element_hashes(x: torch.Tensor, noise: Noise, layer: int) -> torch.Tensor:
    """int32 [B, T, C]: a hash of all coordinates of each element of x."""
    rows = _row_hashes(x.shape[1], noise, layer, x.device)
    first, second = _low(rows), _low(rows >> 32)
    channels = torch.arange(x.shape[2], dtype=torch.int32, device=x.device) * _C32
    h = (channels ^ first.unsqueeze(-1)).mul_(_A32).add_(second.unsqueeze(-1))
    h ^= (h >> 15) & 0x1FFFF  # the shift keeps the sign; the mask makes it a logical one
    h *= _B32S
    h ^= (h >> 16) & 0xFFFF
    h *= _A32
    return h


def _row_hashes(tokens: int, noise: Noise, layer: int, device: torch.device) -> torch.Tensor:
    """int64 [B, T]: a hash of all coordinates but the channel."""
    key = _mix_int(_mix_int(_mix_int(noise.seed) ^ noise.step) ^ layer)
    sample = _mix(noise.sample.to(device) ^ _signed(key, 64))
    columns = torch.arange(tokens, device=device) if noise.columns is None else noise.columns.to(device)
    return _mix(sample.unsqueeze(1) + columns * _C64)


def _mix_int(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) of one integer."""
    x = (value + _GOLDEN) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The same of an int64 tensor; torch's integers wrap, and its right shift copies the sign, which the masks take away."""
    x = x + _C64
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _D64
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _E64
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _low(x: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits of int64 as int32; the range is folded first, since a cast out of range is undefined."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)
