"""A folder of things that are costly to make: complete or absent, made by one process while others wait, checked when opened."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from partita.data.hashing import sampled_crc
from partita.errors import PartitaError

log = logging.getLogger(__name__)

_SEAL = "seal.json"


def cache_dir(configured: str | None) -> Path:
    """The cache folder: `data.cache`, else $XDG_CACHE_HOME/partita, else ~/.cache/partita."""
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a relative value is invalid and must be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "partita"


def cached(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder `folder/name`, made by `build(empty folder)` unless a complete and undamaged one is there.

    Any number of processes may ask at once; one builds. A damaged entry is built again.
    Raises PartitaError where the cache can't be written; errors of `build` pass through and leave nothing behind.
    """
    entry = folder / name
    if _damage(entry) is None:
        return entry
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if (damage := _damage(entry)) is not None:
                _replace(entry, build, damage)
    except OSError as error:
        raise PartitaError(
            f"data.cache: can't write {entry}: {error}\n    -> free space there, or set data.cache to another folder"
        ) from error
    return entry


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that the system drops when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(entry: Path, build: Callable[[Path], None], damage: str) -> None:
    if entry.exists():
        log.warning("cache entry %s is damaged (%s); it is made again", entry, damage)
        shutil.rmtree(entry)
    for left in entry.parent.glob(f"{entry.name}.tmp-*"):  # of a builder that was killed: the lock says that none is at work
        shutil.rmtree(left)
    scratch = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
    try:
        build(scratch)
        seal = {p.name: _stamp(p) for p in sorted(scratch.iterdir())}
        (scratch / _SEAL).write_text(json.dumps(seal))
        scratch.rename(entry)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _stamp(path: Path) -> list[int]:
    """Size and sampled checksum of a file."""
    size = path.stat().st_size
    data = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    return [size, sampled_crc(data)]


def _damage(entry: Path) -> str | None:
    """What is wrong with a cache entry in words; None when it can be used."""
    if not entry.is_dir():
        return "missing"
    try:
        seal = json.loads((entry / _SEAL).read_text())
        wrong = [name for name, stamp in seal.items() if _stamp(entry / name) != stamp]
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return f"wrong size or checksum: {', '.join(wrong)}" if wrong else None
