"""The state of each rank in a small memory-mapped file, which outlives it and which all ranks of a shared folder can read."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<qqqqqd48s")


@dataclass(frozen=True)
class State:
    """beat: counts up once a second while the process runs. calls: collectives begun. waiting: whether in one now. own: median seconds
    of a step outside of collectives; 0 while unknown. last: name of the last collective."""

    beat: int = 0
    pid: int = 0
    step: int = 0
    calls: int = 0
    waiting: bool = False
    own: float = 0.0
    last: str = ""


class Beat:
    """This rank's record, and the reading of all."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.world = folder, rank, world
        self.beat = self.step = self.calls = self.depth = 0
        self.own, self.last = 0.0, ""
        path = self._path(rank)
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self.write()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.beat"

    def write(self) -> None:
        """Publish; about two microseconds."""
        values = (self.beat, os.getpid(), self.step, self.calls, self.depth > 0, self.own, self.last.encode()[:48])
        _RECORD.pack_into(self._map, 0, *values)

    def read(self, rank: int) -> State:
        """Of any rank; all zero where it has not begun."""
        try:
            data = self._path(rank).read_bytes()
        except OSError:
            return State()
        if len(data) != _RECORD.size:
            return State()
        beat, pid, step, calls, waiting, own, last = _RECORD.unpack(data)
        return State(beat, pid, step, calls, bool(waiting), own, last.rstrip(b"\0").decode(errors="replace"))

    def all(self) -> list[State]:
        """In rank order."""
        return [self.read(rank) for rank in range(self.world)]
