"""Files for as long as a process lives: in memory where the system has such, else in folders that the next start sweeps."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"partita_[a-z]+_(\d+)_\w+")


@contextmanager
def nameless_file(what: str) -> Iterator[Path]:
    """An empty file that the ranks of this process can open by its path, and that is gone with this process however that ends."""
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        with scratch_folder(what) as folder:
            yield folder / what
        return
    handle = os.memfd_create(f"partita-{what}")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A folder for temporary files, removed at the end. Those of processes that were killed are removed first."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"partita_{what}_{os.getpid()}_", ignore_cleanup_errors=True) as name:
        yield Path(name)


def sweep(folder: Path) -> None:
    """Remove the scratch folders below `folder` whose process is gone. Other users' stay: they can't be removed."""
    for path in folder.glob("partita_*_*_*"):
        match = _NAME.fullmatch(path.name)
        if match and not _alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
