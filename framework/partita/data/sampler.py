"""Which samples an update uses: a pure function of seed and step.

The endless order is epoch 0, epoch 1, ..., each a permutation of all samples that depends on seed and epoch only. Update `step`
(from 1) uses its positions (step - 1) * global_batch to step * global_batch - 1. Ranks and micro-batches only divide this range,
so any layout sees the same samples, and resuming needs nothing but the step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partita.data.hashing import grid, key, mix

Indices = NDArray[np.int64]

SORTED = 1 << 16  # sets up to this size are permuted by sorting hashes; larger ones by a cipher that needs no memory
_ROUNDS = 6


def permute(positions: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Images of `positions` (each below `size`) under the permutation of this seed and epoch."""
    secret = key("order", seed, epoch)
    if size <= SORTED:
        hashes = grid(secret, np.arange(size, dtype=np.int64), 1)[:, 0]
        return np.argsort(hashes, kind="stable")[positions].astype(np.int64)
    return _walk(positions, size, secret)


def _walk(positions: Indices, size: int, secret: int) -> Indices:
    """A cipher on the next power of 4, repeated until the value falls below `size` (cycle walking: Black and Rogaway 2002)."""
    half = ((size - 1).bit_length() + 1) // 2
    out = _feistel(positions.astype(np.uint64), half, secret)
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _feistel(out[outside], half, secret)
    return out.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, secret: int) -> NDArray[np.uint64]:
    """A bijection of integers of 2 x `half` bits: a balanced Feistel network, whatever the round function."""
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & low
    for turn in range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ np.uint64(key("round", secret, turn))) & low)
    return (left << shift) | right


class Order:
    """The endless order of `size` samples. Without `shuffle` every epoch is 0, 1, 2, ..."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._cached: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def indices(self, first: int, count: int) -> Indices:
        """Sample indices [count] at positions first, first + 1, ..., across the ends of epochs."""
        positions = np.arange(first, first + count, dtype=np.int64)
        epochs, inside = np.divmod(positions, self.size)
        if not self.shuffle:
            return inside
        out = np.empty_like(inside)
        for epoch in range(first // self.size, (first + count - 1) // self.size + 1) if count else ():
            chosen = epochs == epoch
            out[chosen] = self._permuted(inside[chosen], epoch)
        return out

    def _permuted(self, inside: Indices, epoch: int) -> Indices:
        if self.size > SORTED:
            return permute(inside, self.size, self.seed, epoch)
        known, whole = self._cached  # one tuple, so that several threads always see an epoch with its own permutation
        if known != epoch:
            whole = permute(np.arange(self.size, dtype=np.int64), self.size, self.seed, epoch)
            self._cached = (epoch, whole)
        return whole[inside]


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """First and one past the last of `total` items that belong to `rank` of `size`: contiguous, sizes differ by at most 1."""
    return total * rank // size, total * (rank + 1) // size
