"""Dropout whose mask depends on seed, step, layer, sample, token position and channel, and on no layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Noise:
    """Identity of a micro-batch's randomness. sample: [B] global sample numbers."""

    seed: int
    step: int
    sample: torch.Tensor


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash in int64 arithmetic (finaliser with full avalanche)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform(shape: tuple[int, int, int], noise: Noise, layer: int) -> torch.Tensor:
    """[B, T, C] float32 values in [0, 1): a pure function of the identity of each element."""
    _, t, c = shape
    device = noise.sample.device
    base = _mix(torch.tensor([(noise.seed * 0x9E3779B1 + noise.step * 0x85EBCA77 + layer * 0xC2B2AE3D) & _MASK], device=device))
    row = _mix((noise.sample.to(torch.int64) + base) & _MASK)[:, None]
    token = _mix((row * 31 + torch.arange(t, device=device)) & _MASK)[:, :, None]
    return _mix((token + torch.arange(c, device=device) * 0x9E3779B1) & _MASK).to(torch.float32) / 4294967296.0


def dropout(x: torch.Tensor, p: float, noise: Noise | None, layer: int) -> torch.Tensor:
    """Inverted dropout of x [B, T, C] with probability p; x itself where p is 0 or there is no noise (evaluation)."""
    if p == 0.0 or noise is None:
        return x
    keep = uniform((x.shape[0], x.shape[1], x.shape[2]), noise, layer) >= p
    return x * keep.to(x.dtype) / (1.0 - p)
