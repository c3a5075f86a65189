"""Token files, memory-mapped: raw .bin (nanoGPT) and Megatron's pair of .bin and .idx.

The .idx file, little-endian: 9 bytes b"MMIDIDX\\0\\0"; uint64 version (1); uint8 dtype code; uint64 number of sequences n; uint64
number of document marks d; int32[n] length of each sequence in tokens; int64[n] its offset in the .bin file in bytes; int64[d]
the sequence with which each document begins, the last mark being n; and int8[n] modes where the data is multimodal.
Source: the documented layout of Megatron-Core's IndexedDataset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.errors import PartitaError

Tokens = NDArray[Any]
Starts = NDArray[np.int64]

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floats, which no token is stored as.
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}


@dataclass(frozen=True)
class TokenFile:
    """Tokens [n], read from the disk as they are used, and the offset of each document's first token (None: not known)."""

    tokens: Tokens
    starts: Starts | None


def read_raw(path: Path, dtype: str) -> TokenFile:
    """A file of nothing but ids of `dtype` (uint16, uint32, int32), little-endian. Raises PartitaError where that can't be."""
    kind = np.dtype(dtype).newbyteorder("<")
    size = _size(path)
    if size % kind.itemsize:
        raise PartitaError(
            f"data.path: {path} has {size} bytes, which is no multiple of {kind.itemsize} ({dtype}): cut short or another type\n"
            "    -> data.dtype=uint16, uint32 or int32; data.format=megatron where an .idx file belongs to it"
        )
    return TokenFile(_map(path, kind, size // kind.itemsize), None)


def read_megatron(path: Path) -> TokenFile:
    """The pair PREFIX.bin and PREFIX.idx; `path` is either of them. Raises PartitaError for damaged files."""
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    raw = np.memmap(index, dtype=np.uint8, mode="r") if _size(index) else np.empty(0, np.uint8)
    kind, sequences, marks = _header(index, raw)
    lengths, offsets, documents = _tables(index, raw, sequences, marks)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(offsets, bounds[:-1] * kind.itemsize):
        raise PartitaError(
            f"data.path: the sequences of {index} don't lie one after another in {data.name}\n"
            "    -> write the pair anew with Megatron's builder"
        )
    total, size = int(bounds[-1]), _size(data)
    if size != total * kind.itemsize:
        raise PartitaError(
            f"data.path: {data} has {size} bytes, but {index.name} describes "
            f"{total} tokens of {kind.itemsize} bytes: not a pair, or cut short"
        )
    _check_marks(index, documents, sequences)
    starts = np.unique(bounds[documents])
    return TokenFile(_map(data, kind, total), starts[starts < total])  # an empty document at the end begins nowhere


def _header(index: Path, raw: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    if raw.size < _HEADER.size:
        raise PartitaError(f"data.path: {index} has {raw.size} bytes, fewer than the header of an index: cut short")
    magic, version, code, sequences, marks = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if magic != MAGIC or version != 1:
        raise PartitaError(
            f"data.path: {index} is not a Megatron index of version 1 (it begins with {magic!r}, version {version})"
        )
    if code not in _DTYPES:
        raise PartitaError(
            f"data.path: {index} has the dtype code {code}\n    -> known: {', '.join(map(str, _DTYPES))} (integers)"
        )
    return np.dtype(_DTYPES[code]), sequences, marks


def _tables(index: Path, raw: NDArray[np.uint8], sequences: int, marks: int) -> tuple[NDArray[np.int32], Starts, Starts]:
    """Lengths [n], byte offsets [n] and document marks [d]."""
    at = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * marks])
    if raw.size not in (at[3], at[3] + sequences):
        raise PartitaError(
            f"data.path: {index} has {raw.size} bytes, but {sequences} sequences and {marks} document marks "
            f"need {at[3]}: cut short or damaged"
        )
    return raw[at[0] : at[1]].view("<i4"), raw[at[1] : at[2]].view("<i8"), raw[at[2] : at[3]].view("<i8")


def _check_marks(index: Path, documents: Starts, sequences: int) -> None:
    rising = documents.size == 0 or bool((np.diff(documents) >= 0).all())
    if not documents.size or documents[0] != 0 or documents[-1] != sequences or not rising:
        raise PartitaError(f"data.path: {index} is damaged: its document marks don't rise from 0 to {sequences}")


def write_megatron(prefix: Path, documents: list[Tokens], dtype: str = "uint16") -> None:
    """Writes PREFIX.bin and PREFIX.idx, one sequence for each document."""
    kind = np.dtype(dtype).newbyteorder("<")
    lengths = np.array([len(d) for d in documents], dtype="<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    with prefix.with_suffix(".bin").open("wb") as file:
        for document in documents:
            file.write(np.asarray(document, dtype=kind).tobytes())
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(_HEADER.pack(MAGIC, 1, _CODES[kind], len(documents), len(documents) + 1))
        file.write(lengths.tobytes())
        file.write((ends - lengths.astype(np.int64) * kind.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(documents) + 1, dtype="<i8").tobytes())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise PartitaError(f"data.path: can't read {path}: {error.strerror}") from error


def _map(path: Path, kind: np.dtype[Any], count: int) -> Tokens:
    if not count:
        return np.empty(0, kind)
    try:
        return np.memmap(path, dtype=kind, mode="r", shape=(count,))
    except (OSError, ValueError) as error:
        raise PartitaError(f"data.path: can't map {path}: {error}") from error
