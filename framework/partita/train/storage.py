"""Documents of a checkpoint on disk: sealed JSON, values as JSON, small files through to the disk. No pickle anywhere."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError

DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
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


def write_sealed(path: Path, content: dict[str, Any], durable: bool = True) -> None:
    """Write a JSON document whose first key is the SHA-256 of the rest. durable: it is on the disk when this returns."""
    rest = json.dumps(content, separators=(",", ":"))[1:]
    digest = hashlib.sha256(rest.encode()).hexdigest()
    write_text(path, f'{{"sha256":"{digest}",{rest}', durable)


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


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write a small file; `durable`: through to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        if durable:
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
        with if_supported():
            os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write below `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def if_supported() -> Any:
    """Pass over what a file system does not know; any other error counts."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
