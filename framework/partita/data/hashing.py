"""Integers that look random and depend on their inputs only: the same on every machine, layout and numpy version."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_BLOCK = 1 << 16  # bytes of one block that `sampled_crc` reads
_BLOCKS = 64  # blocks at most, so that a file of any size costs a few milliseconds


def mix(values: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers. Returns a new array."""
    x = values + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*parts: int | str) -> int:
    """A 64-bit key from names and integers, of any size and sign."""
    text = "\0".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def grid(seed: int, rows: NDArray[np.int64], columns: int) -> U64:
    """Hashes [len(rows), columns] of (seed, row number, column): a cell never depends on the other rows."""
    of_row = mix(rows.astype(np.uint64) ^ np.uint64(seed & _MASK64))
    return mix(of_row[:, None] + np.arange(columns, dtype=np.uint64)[None, :] * np.uint64(_GOLDEN))


def uniform(hashes: U64) -> NDArray[np.float64]:
    """Hashes as numbers in [0, 1), from their upper 53 bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def fraction(data: bytes) -> float:
    """A number in [0, 1) that depends on the bytes only."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little") / 2.0**48


def digest(*parts: object) -> str:
    """32 hexadecimal digits for the `repr` of plain values; names files in the cache."""
    return hashlib.blake2b("\0".join(map(repr, parts)).encode(), digest_size=16).hexdigest()


def sampled_crc(data: NDArray[np.uint8]) -> int:
    """CRC-32 of up to 64 evenly spaced blocks of 64 KiB, the first and the last among them (all bytes of data up to 4 MiB)."""
    if data.size <= _BLOCK * _BLOCKS:
        return zlib.crc32(data.data)
    crc = 0
    for start in np.linspace(0, data.size - _BLOCK, _BLOCKS).astype(np.int64):
        crc = zlib.crc32(data[start : start + _BLOCK].data, crc)
    return crc
