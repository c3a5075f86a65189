"""Starts the ranks of a run: exactly one spawner, ourselves through torch's elastic launcher, or torchrun or Slurm that started us."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from partita.errors import PartitaError, RunInterrupted
from partita.runtime.spec import RunSpec
from partita.runtime.worker import Outcome, clear_outcomes, read_failure, run_rank

log = logging.getLogger("partita")
Entry = Callable[[RunSpec], dict[str, Any]]


def joined() -> str | None:
    """Who started this process as one rank of several: `torchrun`, `slurm` or nobody."""
    if "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return "torchrun"
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ and "SLURM_STEP_ID" in os.environ:
        return "slurm"
    return None


def launch(entry: Entry, spec: RunSpec, ranks: int) -> dict[str, Any]:
    """Run `entry(spec)` on `ranks` ranks to its end; returns rank 0's summary.

    Raises RunInterrupted after a signal that the ranks left a checkpoint for, PartitaError with one message for a failed rank.
    """
    spawner = joined()
    if spawner:
        _adopt_slurm(spawner)
        return _finish(run_rank(entry, spec, 0, os.getpid()), spec)
    clear_outcomes(spec.job.dir)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a failure costs one message, which is ours
    method = "spawn" if torch.accelerator.is_available() else "fork"
    log.info("starting %d rank%s (%s); logs in %s", ranks, "s" * (ranks > 1), method, spec.job.dir / "log")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"partita-{os.getpid()}-{time.monotonic_ns()}",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=method,
        logs_specs=DefaultLogsSpecs(),
        signals_to_handle="SIGUSR2",  # SIGINT and SIGTERM are ours
    )
    forward = _Forward(spec.config["launch"]["grace"])
    try:
        with forward:
            results = elastic_launch(config, run_rank)(entry, spec, ranks, os.getpid())
    except ChildFailedError as error:
        raise PartitaError(read_failure(spec, error)) from None
    except SystemExit as stopped:
        raise PartitaError(read_failure(spec, stopped)) from None
    return _finish(results[0], spec)


def _finish(outcome: Outcome, spec: RunSpec) -> dict[str, Any]:
    if outcome.signum:
        raise RunInterrupted(outcome.signum, outcome.message)
    return outcome.summary


def _adopt_slurm(spawner: str) -> None:
    """Slurm names ranks in its own variables; torch reads others."""
    if spawner != "slurm":
        return
    os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
    os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_NTASKS"])
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    first = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_ADDR", first)
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000))


class _Forward:
    """While ranks run, a signal to this process goes to them; they save and leave. A second one, or the end of `grace`, kills them."""

    def __init__(self, grace: float) -> None:
        self._grace, self._seen = grace, 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Forward:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        children = _children()
        if self._seen == signal.SIGINT and signum == signal.SIGINT:
            self._kill(children, signum)
        self._seen = signum
        for pid in children:
            _send(pid, signum)
        signal.signal(signal.SIGALRM, lambda *_: self._kill(_children(), signum))
        signal.setitimer(signal.ITIMER_REAL, self._grace)

    def _kill(self, children: list[int], signum: int) -> None:
        for pid in children:
            _send(pid, signal.SIGKILL)
        os._exit(128 + signum)


def _children() -> list[int]:
    """Process ids of our direct children (Linux), which are the ranks."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rsplit(")", 1)[1].split()[1]) == os.getpid():
                        found.append(int(name))
            except OSError:
                continue  # it has just ended
    return found


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        log.debug("process %d is gone already", pid)
