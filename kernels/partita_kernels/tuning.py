"""Which tiles a Triton kernel works on: a default, the same for everyone, or what was fastest when it was measured on a device like this.

default   what the code says (results don't depend on what has been measured where)
tuned     what the file has for this device, kernel and class of shapes, else the default
tune      measure what the file hasn't, and write it there

A class of shapes is a dtype and sizes rounded up to powers of two. Other tiles sum in another order: results of `tuned` are the same each time as long as
the file stays, and differ from those of `default` in their last bits.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from partita_kernels.jit import power_of_2
from partita_kernels.native import cache_dir

MODES = ("default", "tuned", "tune")
REPEAT = 5

Tile = tuple[int, ...]
_mode = "default"


def choose(mode: str) -> None:
    """For the whole process. Raises ValueError for other modes."""
    global _mode
    if mode not in MODES:
        raise ValueError(f"no tuning mode {mode!r}; there are {', '.join(MODES)}")
    _mode = mode
    _table.cache_clear()


@contextmanager
def tuning(mode: str) -> Iterator[None]:
    """`choose` inside a `with`."""
    before = _mode
    choose(mode)
    try:
        yield
    finally:
        choose(before)


def tile(
    kernel: str,
    example: torch.Tensor,
    sizes: Sequence[int],
    default: Tile,
    candidates: Sequence[Tile],
    launch: Callable[[Tile], Any],
) -> Tile:
    """The tile for a launch. example: a tensor of its dtype and device. launch: runs the kernel with a tile; it may run several times."""
    if _mode == "default":
        return default
    key = f"{kernel} {str(example.dtype).removeprefix('torch.')} {'x'.join(str(power_of_2(max(1, n))) for n in sizes)}"
    device = device_name(example.device)
    found = _table(device).get(key)
    if found is None and _mode == "tune":
        found = write(device, key, measure(launch, [default, *(c for c in candidates if c != default)], example.device))
    return default if found is None else tuple(found)


def measure(launch: Callable[[Tile], Any], candidates: Sequence[Tile], device: torch.device) -> Tile:
    """The candidate with the least median time, the first of equal ones; those that don't compile or don't fit are left out.

    Raises the last error where none works.
    """
    best: tuple[float, Tile] | None = None
    error: Exception | None = None
    for candidate in candidates:
        try:
            launch(candidate)
            seconds = statistics.median(_seconds(launch, candidate, device) for _ in range(REPEAT))
        except Exception as failure:  # triton raises what it likes: out of resources, unsupported, ...
            error = failure
            continue
        if best is None or seconds < best[0]:
            best = (seconds, candidate)
    if best is None:
        raise error or ValueError("no candidates")
    return best[1]


def _seconds(launch: Callable[[Tile], Any], candidate: Tile, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    launch(candidate)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@functools.cache
def device_name(device: torch.device) -> str:
    """What measurements hold for: kind of device and version of triton."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, triton {triton.__version__}"


def path() -> Path:
    """tiles.json beside the native kernels: see `native.cache_dir`."""
    return cache_dir() / "tiles.json"


@functools.cache
def _table(device: str) -> dict[str, list[int]]:
    return _read().get(device, {})


def _read() -> dict[str, dict[str, list[int]]]:
    try:
        return json.loads(path().read_text())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path()} is no table of tiles ({error}): delete it, and it is measured anew") from error


def write(device: str, key: str, found: Tile) -> list[int]:
    """Add an entry to the file, keeping what other processes have written. Returns what is there: the first entry for a key stays, so that
    ranks agree."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with path().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        everything = _read()
        kept = everything.setdefault(device, {}).setdefault(key, list(found))
        scratch = path().with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(everything, indent=1, sort_keys=True))
        scratch.replace(path())
    _table.cache_clear()
    return kept
