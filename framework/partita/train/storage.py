"""Bytes of a checkpoint on disk: sealed JSON documents, and shard files with a checksum for each block. No pickle anywhere."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from partita.errors import CheckpointError

BLOCK = 256 * 1024  # bytes under one checksum: small beside a shard, so that a part is read with little around it
CHUNK = 16 * BLOCK  # bytes of one read or write
FLUSH = 64 * CHUNK  # bytes after which written data is forced to the disk: the last flush stays short, the page cache small
ALIGN = 64  # bytes; every part begins on a multiple, so that it can be viewed in any dtype
DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
before_write: Callable[[int], None] | None = None  # called with the size of each chunk: to throttle, or to make it fail
_SEAL = re.compile(r'\A\{"sha256":"([0-9a-f]{64})",')


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------ values as JSON


def encode(value: Any, where: str) -> Any:
    """`value` as JSON types: None, bool, int, float, str, lists and string-keyed dicts as they are, bytes and tuples tagged.

    Raises CheckpointError with the place of the first value of another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return {"__bytes__": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, list | tuple):
        items = [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, dict):
        bad = [k for k in value if not isinstance(k, str) or k in ("__bytes__", "__tuple__")]
        if bad:
            raise CheckpointError(f"{where}: the key {bad[0]!r} can't be stored as JSON; use other strings as keys")
        return {k: encode(v, f"{where}.{k}") for k, v in value.items()}
    raise CheckpointError(f"{where} is a {type(value).__name__}: only JSON values, tuples and bytes are stored beside tensors")


def decode(value: Any) -> Any:
    """The counterpart of `encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"__bytes__"}:
            return base64.b64decode(value["__bytes__"])
        if set(value) == {"__tuple__"}:
            return tuple(decode(v) for v in value["__tuple__"])
        return {k: decode(v) for k, v in value.items()}
    return value


# ------------------------------------------------------------------ documents


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON document whose first key is the SHA-256 of the rest; it is on the disk when this returns."""
    rest = json.dumps(content, separators=(",", ":"))[1:]
    digest = hashlib.sha256(rest.encode()).hexdigest()
    write_text(path, f'{{"sha256":"{digest}",{rest}')


def read_sealed(path: Path) -> dict[str, Any]:
    """A document of `write_sealed`. Raises CheckpointError where it is absent or not what was written."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    seal = _SEAL.match(text)
    if seal is None or hashlib.sha256(text[seal.end() :].encode()).hexdigest() != seal[1]:
        raise CheckpointError(f"{path} is damaged: its checksum does not match; use another checkpoint")
    try:
        content: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; use another checkpoint") from error
    return content


def write_text(path: Path, text: str) -> None:
    """Write a small file through to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Like `write_text`, but a reader, or a machine that stops, sees the old file or the new one, whole."""
    new = path.with_name(path.name + ".new")
    write_text(new, text)
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk, where the file system can do that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with _if_supported():
            os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write below `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def _if_supported() -> Any:
    """Pass over what a file system does not know; any other error counts."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


# ------------------------------------------------------------------ shards


def write_shard(path: Path, data: torch.Tensor, between: Callable[[], None]) -> str:
    """Write the bytes `data` (1-D uint8, host) through to the disk; returns the CRC-32 of each block, 8 hex digits each.

    Space is reserved first: a full disk is found before anything is written, other writers included. `between` is called before
    each chunk and may raise. Raises OSError.
    """
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    sums: list[str] = []
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if len(view):
            with _if_supported():
                os.posix_fallocate(handle, 0, len(view))
        for start in range(0, len(view), CHUNK):
            between()
            if before_write is not None:
                before_write(min(CHUNK, len(view) - start))
            chunk = view[start : start + CHUNK]
            sums += [f"{zlib.crc32(chunk[i : i + BLOCK]):08x}" for i in range(0, len(chunk), BLOCK)]
            _write_all(handle, chunk, start)
            if (start + CHUNK) % FLUSH == 0:
                os.fsync(handle)
        os.fsync(handle)
    finally:
        os.close(handle)
    return "".join(sums)


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(handle, data, offset)
        data, offset = data[done:], offset + done


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
