"""A file without a name, read and written past the page cache by several threads at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from partita.errors import PartitaError
from partita.state.tiers.tier import BLOCK

REQUEST = 4 << 20  # bytes of one request: disks reach their bandwidth, and a shard still is several requests
THREADS = 8  # requests under way at once


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that there is."""
    folder = folder.absolute()
    return next(f for f in (folder, *folder.parents) if f.is_dir())


def probe(folder: Path) -> str:
    """Why direct I/O isn't to be had in a folder; empty where it is. Raises OSError where nothing can be written."""
    handle = _open(folder, _direct_flag())
    if handle is None:
        return f"the file system of {folder} refuses O_DIRECT"
    try:
        memory = mmap.mmap(-1, BLOCK)
        os.pwrite(handle, memory, 0)
        os.preadv(handle, [memory], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return f"the file system of {folder} accepts O_DIRECT and then refuses aligned requests"
    finally:
        os.close(handle)
    return ""


def _direct_flag() -> int:
    return getattr(os, "O_DIRECT", 0)


def _open(folder: Path, flags: int) -> int | None:
    """A new file that goes away with its last handle, even if the machine stops; None where `flags` are refused."""
    base = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | flags
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # not every file system has files without names
            return os.open(folder, base | os.O_TMPFILE, 0o600)
    path = folder / f".partita-{os.getpid()}-{secrets.token_hex(4)}.states"
    try:
        handle = os.open(path, base | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            path.unlink(missing_ok=True)
            return None
        raise
    path.unlink()
    return handle


class DirectFile:
    """Reads and writes of aligned ranges in the background. buffered: why direct I/O isn't used, or empty.

    Raises PartitaError where the folder can't be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.buffered = probe(folder)
            handle = _open(folder, 0 if self.buffered else _direct_flag())
        except OSError as error:
            raise PartitaError(
                f"offload.path={folder} can't be used: {error.strerror}. Give a folder that this user may write to."
            ) from error
        assert handle is not None
        self.handle: int = handle
        self.size = 0
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._requests,), name=f"partita-file-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self._forgotten = weakref.finalize(self, _release, self._requests, handle)  # who is not closed
        self._forgotten.atexit = False

    def grow(self, size: int) -> None:
        """Take `size` more bytes from the disk. Raises PartitaError where they aren't there."""
        free = self.free()
        try:
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if size:
                self._allocate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise PartitaError(f"offload.path={self.folder}: {size:,} bytes can't be reserved: {error.strerror}.") from error
            raise PartitaError(
                f"offload.path={self.folder}: this rank's states need {size:,} bytes there, {self.free():,} are free (every rank of the "
                "node needs its own). Make room, give a folder on a larger disk, lower offload.fraction, or use more ranks."
            ) from error
        self.size += size

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self.handle, self.size, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.ftruncate(self.handle, self.size + size)  # no reservation on this file system

    def free(self) -> int:
        """Bytes that this user may still write in the folder."""
        found = os.fstatvfs(self.handle)
        return found.f_bavail * found.f_frsize

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        """Start to fill `into` (1-D, on any device) from an aligned offset."""
        return self._start(self._read, offset, into)

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        """Start to write `source` (1-D, on any device) at an aligned offset. The last block is filled up with anything."""
        return self._start(self._write, offset, source)

    def _start(self, action: Any, offset: int, tensor: torch.Tensor) -> Transfer:
        if offset % BLOCK:
            raise ValueError(f"offset {offset} is no multiple of {BLOCK}")
        if tensor.device.type != "cpu":
            torch.accelerator.current_stream(tensor.device).synchronize()
        size = tensor.numel() * tensor.dtype.itemsize
        in_place = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.data_ptr() % BLOCK == 0
        address = tensor.data_ptr() if in_place else 0
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        starts = range(0, size, REQUEST)
        for lo in starts:
            here = min(REQUEST, size - lo)
            direct = address + lo if in_place and here % BLOCK == 0 else 0
            self._requests.put(_Request(action, offset + lo, here, direct, lo, tensor, ended))
        return Transfer(ended, len(starts))

    def _read(self, request: _Request, own: list[mmap.mmap]) -> None:
        if request.direct:
            self._fill(request.offset, _bytes(request.direct, request.size))
            return
        scratch, part = _scratch(own, request.size), request.part()
        self._fill(request.offset, scratch)
        part.copy_(torch.frombuffer(scratch, dtype=part.dtype, count=part.numel()))

    def _write(self, request: _Request, own: list[mmap.mmap]) -> None:
        if request.direct:
            self._drain(request.offset, _bytes(request.direct, request.size))
            return
        scratch, part = _scratch(own, request.size), request.part()
        torch.frombuffer(scratch, dtype=part.dtype, count=part.numel()).copy_(part)
        self._drain(request.offset, scratch)

    def _fill(self, offset: int, view: memoryview) -> None:
        """Read all of `view`."""
        at = 0
        while at < len(view):
            try:
                done = os.preadv(self.handle, [view[at:]], offset + at)
            except OSError as error:
                raise self._failed("read", len(view), offset, error.strerror) from error
            if not done or (done % BLOCK and at + done < len(view)):
                raise self._failed("read", len(view), offset, f"the file ends after {at + done} of them")
            at += done

    def _drain(self, offset: int, view: memoryview) -> None:
        """Write all of `view`."""
        at = 0
        while at < len(view):
            try:
                done = os.pwritev(self.handle, [view[at:]], offset + at)
            except OSError as error:
                raise self._failed("written", len(view), offset, error.strerror) from error
            if done < BLOCK:
                raise self._failed("written", len(view), offset, f"the disk took {at + done} of them")
            at += done - done % BLOCK

    def _failed(self, what: str, size: int, offset: int, why: str | None) -> PartitaError:
        return PartitaError(
            f"offload.path={self.folder}: {size:,} bytes at {offset:,} could not be {what}: {why} ({self.free():,} bytes are free there). "
            "The states in that file are lost: see to the disk or give another folder, then go on from the last checkpoint "
            "with train.resume=auto."
        )

    def close(self) -> None:
        """End the threads and give the disk space back. What waits for its turn is given up."""
        with contextlib.suppress(Empty):
            while True:
                request = self._requests.get_nowait()
                if request is not None:
                    request.ended.put(PartitaError(f"offload.path={self.folder}: the file was closed before the transfer began."))
        self._forgotten.detach()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def _work(requests: SimpleQueue[_Request | None]) -> None:
    """One thread: request after request, until there is none. It holds no file."""
    own: list[mmap.mmap] = []  # memory for what can't be read or written in place
    while (request := requests.get()) is not None:
        try:
            request.action(request, own)
        except BaseException as error:
            request.ended.put(error)
        else:
            request.ended.put(None)
        del request  # it holds a tensor


def _release(requests: SimpleQueue[_Request | None], handle: int) -> None:
    for _ in range(THREADS):
        requests.put(None)
    os.close(handle)


class _Request(NamedTuple):
    """`size` bytes from `start` on of a tensor, at `offset` of the file. direct: their address, where the disk may use them in place."""

    action: Callable[[_Request, list[mmap.mmap]], None]
    offset: int
    size: int
    direct: int
    start: int
    tensor: torch.Tensor
    ended: SimpleQueue[BaseException | None]

    def part(self) -> torch.Tensor:
        """These elements."""
        width = self.tensor.dtype.itemsize
        return self.tensor[self.start // width : (self.start + self.size) // width]


class Transfer:
    """Requests under way, which say one by one that they have ended; see `partita.state.tiers.Pending`."""

    def __init__(self, ended: SimpleQueue[BaseException | None], count: int) -> None:
        self._ended, self._count = ended, count

    def wait(self) -> None:
        """Return when all are done; raises the first error, after all have ended."""
        found = [self._ended.get() for _ in range(self._count)]
        self._count = 0
        for error in found:
            if error is not None:
                raise error

    settle = wait


def _bytes(address: int, size: int) -> memoryview:
    """Memory as a buffer; its owner must live."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _scratch(own: list[mmap.mmap], size: int) -> memoryview:
    """Whole blocks of a thread's own memory."""
    if not own:
        own.append(mmap.mmap(-1, REQUEST))
    return memoryview(own[0])[: -(-size // BLOCK) * BLOCK]
