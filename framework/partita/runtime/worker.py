"""What stands around the work of each rank: logs, process group, watch over its parent and its peers, one message on failure."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.errors import RunInterrupted
from partita.runtime import phase
from partita.runtime.device import Device
from partita.runtime.signals import StopFlag
from partita.runtime.spec import RunSpec

FAILURE = "failure.json"
WATCH = 0.5  # seconds between looks at parent and peers
LINGER = 3.0  # seconds that a rank gets to leave by itself after another has failed


@dataclass
class Outcome:
    """How a rank ended, when it ended by itself."""

    summary: dict[str, Any] = field(default_factory=dict)
    signum: int = 0
    message: str = ""


def run_rank(entry: Callable[[RunSpec], dict[str, Any]], spec: RunSpec, ranks: int, parent: int) -> Outcome:
    """Body of one rank. `ranks` 0: somebody else has started this process, and `parent` is itself."""
    spawned = ranks > 0
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if spawned:
        _die_with(parent)
    _open_log(spec, rank)
    StopFlag.installed()
    torch.set_num_threads(_threads(spec, world))
    watch = _Watch(spec.job.dir / FAILURE, parent if spawned else None)
    watch.start()
    try:
        _join(spec, world)
        return Outcome(summary=entry(spec))
    except RunInterrupted as stopped:
        return Outcome(signum=stopped.signum, message=str(stopped))
    except BaseException as error:
        _report(spec, rank, error)
        raise
    finally:
        watch.stop()
        if spawned and dist.is_initialized():
            dist.destroy_process_group()


def _join(spec: RunSpec, world: int) -> None:
    if world > 1 and not dist.is_initialized():
        device = Device.current()
        dist.init_process_group(device.backend, timeout=timedelta(seconds=spec.config["launch"]["timeout"]))


def _threads(spec: RunSpec, world: int) -> int:
    wanted = spec.config["launch"]["threads"]
    if wanted != "auto":
        return int(wanted)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    return max(1, len(os.sched_getaffinity(0)) // local)


def _die_with(parent: int) -> None:
    """Ask the kernel (Linux) to end this process with its parent, kill -9 included."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _open_log(spec: RunSpec, rank: int) -> None:
    """Rank 0 writes to the console and to its file, other ranks to their file only."""
    folder = spec.job.dir / "log"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.log"
    if rank:
        file = path.open("a", buffering=1)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    root = logging.getLogger()
    root.handlers.clear()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if rank == 0:
        handlers.append(logging.FileHandler(path))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(spec.config["launch"]["log_level"].upper())


class _Watch(threading.Thread):
    """Ends this process when its parent is gone, or when another rank has failed and this one can't know."""

    def __init__(self, failure: Path, parent: int | None) -> None:
        super().__init__(daemon=True, name="partita-watch")
        self._failure, self._parent, self._done = failure, parent, threading.Event()

    def run(self) -> None:
        """Look twice a second."""
        while not self._done.wait(WATCH):
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(1)
            if self._failure.exists():
                if not self._done.wait(LINGER):
                    os._exit(1)
                return

    def stop(self) -> None:
        """The rank ends by itself."""
        self._done.set()


def _report(spec: RunSpec, rank: int, error: BaseException) -> None:
    """Traceback to the rank's log; the first rank that fails leaves the message for everybody."""
    log_file = spec.job.dir / "log" / f"rank{rank}.log"
    with log_file.open("a") as file:
        file.write("".join(traceback.format_exception(error)))
    message = {
        "rank": rank,
        "step": phase.current.step,
        "phase": phase.current.phase,
        "cause": f"{type(error).__name__}: {error}",
        "time": time.time(),
    }
    own = spec.job.dir / f".failure-{rank}.json"
    own.write_text(json.dumps(message))
    try:
        os.link(own, spec.job.dir / FAILURE)
    except FileExistsError:
        logging.getLogger("partita").debug("another rank failed first")
    own.unlink()


def clear_outcomes(folder: Path) -> None:
    """Forget the failure of an earlier try in the same run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILURE).unlink(missing_ok=True)


def read_failure(spec: RunSpec, error: BaseException) -> str:
    """The one message for a failed run: rank, step, phase, cause, log file."""
    path = spec.job.dir / FAILURE
    ranks = spec.ranks
    if path.exists():
        m = json.loads(path.read_text())
        log_file = spec.job.dir / "log" / f"rank{m['rank']}.log"
        return f"rank {m['rank']} of {ranks} failed at step {m['step']} ({m['phase']}): {m['cause']}\n    log: {log_file}"
    failures = getattr(error, "failures", {})
    if failures:
        rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
        log_file = spec.job.dir / "log" / f"rank{rank}.log"
        return f"rank {rank} of {ranks} ended without a word (exit code {first.exitcode})\n    log: {log_file}"
    return f"the ranks ended: {error}"
