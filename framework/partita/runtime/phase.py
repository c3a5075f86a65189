"""Where each rank is: step and phase, for the one message that a failure costs.

A rank notes its position with `set`. In a run that this program started, the notes lie in a small memory-mapped file: they
outlive a rank that is killed, and the process that started the ranks can read them, and the ranks' process ids.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

DONE = "done"  # phase of a rank that has nothing left to do
_RECORD = struct.Struct("<qq48s")  # process id, step, phase (UTF-8, padded with zeros)


@dataclass
class Position:
    """Last position that was set. `pid` is 0 for a rank that has not started yet."""

    step: int = 0
    phase: str = "start"
    pid: int = 0

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})"


current = Position()
_shared: tuple[mmap.mmap, int] | None = None


def set(*, step: int, phase: str) -> None:
    """Note the position; costs a microsecond."""
    current.step, current.phase = step, phase
    if _shared is not None:
        board, offset = _shared
        _RECORD.pack_into(board, offset, current.pid, step, phase.encode()[:48])


def share(board: Path, rank: int) -> None:
    """Write this rank's position to its place on a board from now on."""
    global _shared
    _shared = (_map(board), rank * _RECORD.size)
    current.pid = os.getpid()
    set(step=0, phase="start")


class Board:
    """The positions of `ranks` ranks, in a file."""

    def __init__(self, path: Path, ranks: int) -> None:
        path.write_bytes(bytes(_RECORD.size * ranks))
        self.path, self.ranks = path, ranks
        self._map = _map(path)

    def __getitem__(self, rank: int) -> Position:
        pid, step, phase = _RECORD.unpack_from(self._map, rank * _RECORD.size)
        return Position(step, phase.rstrip(b"\0").decode(errors="replace") or "start", pid)

    def all(self) -> list[Position]:
        """In rank order."""
        return [self[rank] for rank in range(self.ranks)]


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
