"""Reading and writing the files of a checkpoint. See `partita.train.checkpoint` for the format."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError
from partita.state.slices import StateSlice

VERSION = 1
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool)}  # fmt: skip


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).cast("B") if tensor.numel() else memoryview(b"")


def write_json(path: Path, value: Any) -> None:
    """Complete or not there."""
    working = path.with_suffix(".part")
    with working.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(working, path)


def fsync_folder(path: Path) -> None:
    """Make renames inside a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Index:
    """Where each tensor's parts lie in a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        head = _read_json(path / "checkpoint.json")
        if head.get("version") != VERSION:
            raise CheckpointError(f"{path} has format version {head.get('version')}; this version reads {VERSION}")
        self.ranks, self.extra, self.step = int(head["ranks"]), head["extra"], int(head["step"])
        self.entries: dict[str, list[dict[str, Any]]] = {}
        self.bytes_read = 0
        self._rank_extra: dict[int, Any] = {}
        for rank in range(self.ranks):
            part = _read_json(path / f"rank{rank:05d}.json")
            self._rank_extra[rank] = part["rank_extra"]
            for entry in part["slices"]:
                self.entries.setdefault(entry["key"], []).append({**entry, "file": f"rank{rank:05d}.bin"})

    def rank_extra(self, rank: int) -> Any:
        """What that rank added."""
        return self._rank_extra[rank]

    def fill(self, s: StateSlice) -> None:
        """Write the elements [lo, hi) of a tensor into `s.data`; raises CheckpointError where some are missing or damaged."""
        found = 0
        for entry in self.entries[s.key]:
            if tuple(entry["shape"]) != tuple(s.shape):
                raise CheckpointError(f"{self._path}: {s.key} has shape {tuple(entry['shape'])}; this model wants {tuple(s.shape)}")
            lo, hi = max(s.lo, entry["lo"]), min(s.hi, entry["hi"])
            if lo < hi:
                s.data[lo - s.lo : hi - s.lo].copy_(self._read(entry)[lo - entry["lo"] : hi - entry["lo"]])
                found += hi - lo
        if found != s.hi - s.lo:
            raise CheckpointError(f"{self._path}: {s.key} is incomplete: {found} of {s.hi - s.lo} elements")

    def _read(self, entry: dict[str, Any]) -> torch.Tensor:
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{self._path}: {entry['key']} has unknown dtype {entry['dtype']!r}")
        try:
            with (self._path / entry["file"]).open("rb") as file:
                file.seek(entry["offset"])
                data = bytearray(file.read(entry["bytes"]))
        except OSError as error:
            raise CheckpointError(f"{self._path / entry['file']} can't be read: {error}") from None
        self.bytes_read += len(data)
        if len(data) != entry["bytes"] or zlib.crc32(data) != entry["crc32"]:
            raise CheckpointError(f"{self._path / entry['file']} is damaged at {entry['key']}: checksum or length is wrong")
        return torch.frombuffer(data, dtype=dtype)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(key, shape, elements) of all tensors."""
        for key, entries in self.entries.items():
            shape = tuple(entries[0]["shape"])
            yield key, shape, math.prod(shape)


def read_index(path: Path) -> Index:
    """The index of a complete checkpoint; CheckpointError otherwise."""
    if not (path / "checkpoint.json").exists():
        raise CheckpointError(f"{path} is no complete checkpoint (it has no checkpoint.json)")
    return Index(path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
