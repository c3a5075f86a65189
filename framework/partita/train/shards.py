"""Shard files of a checkpoint: the bytes of one rank's tensors, with a checksum for each block.

Written past the page cache where the file system can do that (no copy, and nothing that has to be flushed in the end), by a few threads
of low priority: one computes checksums while another waits for the disk. Read block by block, each against its checksum.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from partita.errors import CheckpointError
from partita.train.storage import if_supported

BLOCK = 256 * 1024  # bytes under one checksum: small beside a shard, so that a part is read with little around it
CHUNK = 16 * BLOCK  # bytes of one read or write
FLUSH = 64 * CHUNK  # bytes after which data in the page cache is forced to the disk: the last flush stays short
ALIGN = 64  # bytes; every part begins on a multiple, so that it can be viewed in any dtype
PAGE = 4096  # bytes; direct writes begin and end on multiples, in memory and in the file
WRITERS = 3  # threads that write one shard
NICE = 15  # of the threads that save: training goes first
before_write: Callable[[int], None] | None = None  # called with the size of each chunk: to throttle, or to make it fail


# ------------------------------------------------------------------ memory and priority


def host_buffer(size: int, pinned: bool) -> torch.Tensor:
    """`size` bytes of host memory that begin on a page, so that they can be written directly."""
    raw = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + size]


def step_back() -> None:
    """Give the calling thread a low priority, where threads have one of their own (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


# ------------------------------------------------------------------ writing


def write_shard(path: Path, data: torch.Tensor, between: Callable[[], None]) -> str:
    """Write the bytes `data` (1-D uint8, host) through to the disk; returns the CRC-32 of each block, 8 hex digits each.

    Space is reserved first: a full disk is found before anything is written, other writers included. `between` is called before
    each chunk, by one thread at a time, and may raise. Raises OSError.
    """
    with _ShardFile(path, data) as file:
        work = _Work(file, between)
        helpers = [threading.Thread(target=work.help, daemon=True) for _ in range(min(WRITERS, len(work.sums)) - 1)]
        for helper in helpers:
            helper.start()
        work.run()
        for helper in helpers:
            helper.join()
        if work.failed:
            raise work.failed[0]
        file.sync()
    return "".join(work.sums)


def checksums(data: torch.Tensor) -> str:
    """What `write_shard` returns, of bytes that are written already."""
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    return "".join(_sums_of(view[start : start + CHUNK]) for start in range(0, len(view), CHUNK))


def _sums_of(chunk: memoryview) -> str:
    return "".join(f"{zlib.crc32(chunk[i : i + BLOCK]):08x}" for i in range(0, len(chunk), BLOCK))


class _Work:
    """The chunks of one shard, taken by whichever thread is free."""

    def __init__(self, file: _ShardFile, between: Callable[[], None]) -> None:
        self.sums = [""] * -(-len(file.view) // CHUNK)
        self.failed: list[BaseException] = []
        self._file, self._between = file, between
        self._next, self._lock = iter(range(len(self.sums))), threading.Lock()

    def help(self) -> None:
        """Body of a thread of its own."""
        step_back()
        self.run()

    def run(self) -> None:
        """Take chunks until there are none, or a thread has failed."""
        try:
            while not self.failed:
                with self._lock:
                    number = next(self._next, None)
                    if number is None:
                        return
                    self._between()
                self._one(number)
        except BaseException as error:
            self.failed.append(error)

    def _one(self, number: int) -> None:
        start = number * CHUNK
        chunk = self._file.view[start : start + CHUNK]
        if before_write is not None:
            before_write(len(chunk))
        self.sums[number] = _sums_of(chunk)
        self._file.write(chunk, start)


class _ShardFile:
    """The file of one shard, open twice: for what can be written directly, and for the rest."""

    def __init__(self, path: Path, data: torch.Tensor) -> None:
        self.view = memoryview(data.numpy())  # type: ignore[arg-type]
        self._plain = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._direct: int | None = None
        try:
            if len(self.view):
                with if_supported():
                    os.posix_fallocate(self._plain, 0, len(self.view))
            if data.data_ptr() % PAGE == 0 and len(self.view) >= PAGE:
                self._direct = _open_direct(path)
        except BaseException:
            os.close(self._plain)
            raise

    def __enter__(self) -> _ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def write(self, chunk: memoryview, start: int) -> None:
        """Write a chunk; its last part page goes through the page cache."""
        whole = len(chunk) // PAGE * PAGE if self._direct is not None else 0
        if whole:
            try:
                _write_all(self._direct, chunk[:whole], start)  # type: ignore[arg-type]
            except OSError as error:
                if error.errno != errno.EINVAL:  # a disk with larger sectors than pages
                    raise
                whole = 0
        if whole < len(chunk):
            _write_all(self._plain, chunk[whole:], start + whole)
            if (start + CHUNK) % FLUSH == 0:
                os.fsync(self._plain)

    def sync(self) -> None:
        """All of it is on the disk when this returns."""
        os.fsync(self._plain)


def _open_direct(path: Path) -> int | None:
    """A handle that writes past the page cache; None where the system or the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(handle, data, offset)
        data, offset = data[done:], offset + done


# ------------------------------------------------------------------ reading


class Piece(NamedTuple):
    """Bytes [lo, hi) of a shard, which hold elements of `dtype` for the 1-D tensor `target` (None: they are only checked)."""

    lo: int
    hi: int
    dtype: torch.dtype
    target: torch.Tensor | None


def read_pieces(path: Path, size: int, sums: str, pieces: Iterable[Piece]) -> int:
    """Fill the targets from the shard at `path` of `size` bytes, converting dtypes; returns the bytes read.

    Only blocks that hold something wanted are read, each once, and each against its checksum `sums`; memory needed is one chunk.
    Raises CheckpointError where the file is absent, short or damaged.
    """
    work: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        for chunk in range(piece.lo // CHUNK, -(-piece.hi // CHUNK)):
            work[chunk].append(piece)
    scratch = torch.empty(CHUNK, dtype=torch.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            return sum(_read_chunk(file.fileno(), path, size, sums, c, work[c], scratch) for c in sorted(work))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def _read_chunk(handle: int, path: Path, size: int, sums: str, chunk: int, pieces: list[Piece], scratch: torch.Tensor) -> int:
    base = chunk * CHUNK
    wanted: set[int] = set()
    for p in pieces:
        wanted.update(range((max(p.lo, base) - base) // BLOCK, -(-(min(p.hi, base + CHUNK) - base) // BLOCK)))
    view = memoryview(scratch.numpy())  # type: ignore[arg-type]
    read = 0
    for first, last in _runs(sorted(wanted)):
        lo, hi = first * BLOCK, min(last * BLOCK, size - base)
        _read_exactly(handle, path, view[lo:hi], base + lo)
        for block in range(first, last):
            _check_block(path, view[block * BLOCK : min((block + 1) * BLOCK, hi)], base // BLOCK + block, sums)
        read += hi - lo
    for p in pieces:
        if p.target is not None:
            lo, hi = max(p.lo, base), min(p.hi, base + CHUNK)
            values = scratch[lo - base : hi - base].view(p.dtype)
            start = (lo - p.lo) // p.dtype.itemsize
            p.target[start : start + values.numel()].copy_(values)
    return read


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges [first, last)."""
    out: list[tuple[int, int]] = []
    for n in numbers:
        if out and out[-1][1] == n:
            out[-1] = (out[-1][0], n + 1)
        else:
            out.append((n, n + 1))
    return out


def _read_exactly(handle: int, path: Path, into: memoryview, offset: int) -> None:
    while into:
        done = os.preadv(handle, [into], offset)
        if not done:
            raise CheckpointError(f"{path} is {len(into)} bytes too short: the checkpoint is damaged; use another one")
        into, offset = into[done:], offset + done


def _check_block(path: Path, block: memoryview, number: int, sums: str) -> None:
    if f"{zlib.crc32(block):08x}" != sums[8 * number : 8 * number + 8]:
        at = number * BLOCK
        raise CheckpointError(
            f"{path} is damaged: bytes {at} to {at + len(block)} do not match their checksum; use another checkpoint"
        )
