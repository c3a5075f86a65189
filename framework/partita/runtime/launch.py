"""Starts the ranks of a run: exactly one spawner, ourselves through torch's elastic launcher, or whoever started us."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from partita.errors import RunInterrupted
from partita.runtime import failure
from partita.runtime.joining import adopt, check_joined, joined
from partita.runtime.phase import Board
from partita.runtime.scratch import nameless_file
from partita.runtime.spec import RunSpec
from partita.runtime.supervise import Supervisor
from partita.runtime.worker import Entry, Origin, Outcome, run_joined, run_spawned

__all__ = ["joined", "launch"]

log = logging.getLogger("partita")
LOOPBACK = "127.0.0.1"


def launch(entry: Entry, spec: RunSpec, ranks: int, leave_at: float | None = None) -> dict[str, Any]:
    """Run `entry(spec)` on `ranks` ranks to its end; returns rank 0's summary (under torchrun or Slurm: this rank's).

    entry: a module-level function. leave_at: monotonic seconds after which the run is stopped as by a signal, with a checkpoint, so
    that it can go on with more ranks (where we start them). Raises RunInterrupted after a signal, RankFailure with one message for a failed rank,
    ConfigError where the processes that torchrun or Slurm started are not those of the plan. No process of the run is left.
    """
    spawner = joined()
    if spawner is None:
        return _finish(*_spawn(entry, spec, ranks, leave_at))
    adopt()
    check_joined(spawner, ranks, spec.job.multirun)
    return _finish(run_joined(entry, spec, Origin(spawner, os.getppid())), False)


def _spawn(entry: Entry, spec: RunSpec, ranks: int, leave_at: float | None) -> tuple[Outcome, bool]:
    run = spec.job.dir
    # A forked rank has all imports made already. After an accelerator has been touched, fork is not safe.
    method = "spawn" if torch.accelerator.is_available() else "fork"
    log.info("starting %d rank%s on this machine (%s); logs in %s", ranks, "s" * (ranks > 1), method, failure.folder(run))
    with nameless_file("positions") as path, _environment():
        board = Board(path, ranks)
        origin = Origin(f"partita ({method})", os.getpid(), board.path)
        supervisor = Supervisor(board, spec.config["launch"]["grace"], leave_at)
        try:
            with supervisor:
                failure.clear(run)
                outcome = elastic_launch(_launch_config(ranks, method), run_spawned)(entry, spec, origin)[0]
            return outcome, supervisor.to_grow
        except ChildFailedError as error:
            # Outside of this block: the launcher's own error says less than we know, but for ranks that ended before they told who they are.
            positions = board.all()
            unknown = {rank: failed.exitcode for rank, failed in error.failures.items() if not positions[rank].pid}
            ended = unknown or dict(supervisor.ended)
    # 0: the launcher has taken the status before anyone could look
    if supervisor.signum and (supervisor.late or set(ended.values()) <= {-supervisor.signum, 0}):
        raise RunInterrupted(supervisor.signum, _cut_off(supervisor, spec), supervisor.to_grow)
    raise failure.judge(run, ranks, ended, positions)


def _cut_off(supervisor: Supervisor, spec: RunSpec) -> str:
    """What to say when ranks were ended by a signal and could not save."""
    why = (
        f"launch.grace={spec.config['launch']['grace']:g} seconds were over"
        if supervisor.late
        else "the ranks had not started yet"
    )
    return (
        f"stopped by signal {supervisor.signum} without a new checkpoint: {why}. The newest complete checkpoint is not touched."
    )


def _launch_config(ranks: int, method: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr=LOOPBACK,  # no look-up of the machine's name, which can take seconds
        run_id=f"partita-{os.getpid()}-{time.monotonic_ns()}",
        max_restarts=0,
        monitor_interval=0.05,
        start_method=method,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks keep logs of their own; it would leave a folder behind
        signals_to_handle="SIGQUIT",  # the others are the supervisor's
    )


@contextmanager
def _environment() -> Iterator[None]:
    """What the launcher and gloo read, for as long as ranks run. A failure costs one message, which is ours."""
    before = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        os.environ.clear()
        os.environ.update(before)


def _finish(outcome: Outcome, to_grow: bool) -> dict[str, Any]:
    if outcome.signum:
        raise RunInterrupted(outcome.signum, outcome.message, to_grow)
    return outcome.summary
