"""A file without a name, read and written past the page cache by several threads at once."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="partita-file")

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
        step = REQUEST // tensor.dtype.itemsize
        parts = [(offset + lo * tensor.dtype.itemsize, tensor[lo : lo + step]) for lo in range(0, tensor.numel(), step)]
        return Transfer(self._threads.submit(action, at, part) for at, part in parts)

    def _read(self, offset: int, into: torch.Tensor) -> None:
        size = into.numel() * into.dtype.itemsize
        if _direct_ready(into, size):
            self._fill(offset, _bytes(into))
            return
        scratch = _scratch(size)
        self._fill(offset, scratch)
        into.copy_(torch.frombuffer(scratch, dtype=into.dtype, count=into.numel()))

    def _write(self, offset: int, source: torch.Tensor) -> None:
        size = source.numel() * source.dtype.itemsize
        if _direct_ready(source, size):
            self._drain(offset, _bytes(source))
            return
        scratch = _scratch(size)
        torch.frombuffer(scratch, dtype=source.dtype, count=source.numel()).copy_(source)
        self._drain(offset, scratch)

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
        """End the threads and give the disk space back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class Transfer:
    """Requests under way; see `partita.state.tiers.Pending`."""

    def __init__(self, requests: Iterable[Future[None]]) -> None:
        self._requests = list(requests)

    def wait(self) -> None:
        """Return when all are done; raises the first error, after all have ended."""
        errors = [e for r in self._requests if (e := r.exception()) is not None]
        self._requests = []
        if errors:
            raise errors[0]

    settle = wait


def _direct_ready(tensor: torch.Tensor, size: int) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.data_ptr() % BLOCK == 0 and size % BLOCK == 0


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


class _Own(threading.local):
    """Aligned memory of each thread for one request."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, REQUEST)


_OWN = _Own()


def _scratch(size: int) -> memoryview:
    """Whole blocks of this thread's memory."""
    return memoryview(_OWN.memory)[: -(-size // BLOCK) * BLOCK]
