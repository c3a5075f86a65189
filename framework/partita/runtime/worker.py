"""What stands around the work of each rank: logs, process group, watch over its parent and its peers, a report on failure."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from partita.errors import ConfigError, RunInterrupted
from partita.runtime import failure, phase
from partita.runtime.device import Device
from partita.runtime.logs import Logs
from partita.runtime.meeting import meeting_store
from partita.runtime.signals import STOPS, StopFlag
from partita.runtime.spec import RunSpec
from partita.runtime.watch import Watch, die_with

Entry = Callable[[RunSpec], dict[str, Any]]
PATIENCE = 2.0  # seconds that a rank whose collective broke waits for the cause to be told


@dataclass(frozen=True)
class Origin:
    """Where a rank comes from. `parent`: process id of whoever started it. `board`: file for positions, if that was us."""

    name: str
    parent: int
    board: Path | None = None


@dataclass
class Outcome:
    """How a rank ended, when it ended by itself."""

    summary: dict[str, Any] = field(default_factory=dict)
    signum: int = 0
    message: str = ""


def run_spawned(entry: Entry, spec: RunSpec, origin: Origin) -> Outcome:
    """Body of a rank that we have started. A failure ends the process here: the parent gives the message."""
    os.setpgid(0, 0)  # a Ctrl-C in the terminal goes to the parent, which tells all ranks, once
    # While ranks wait for each other in C++ no handler of Python's would run, and there is nothing to save yet: signals just end them.
    for signum in STOPS:
        signal.signal(signum, signal.SIG_DFL)
    rank = int(os.environ["RANK"])
    assert origin.board is not None
    phase.share(origin.board, rank)
    die_with(origin.parent)
    logs = Logs(failure.folder(spec.job.dir), rank, spec.config["launch"]["log_level"])
    try:
        return _work(entry, spec, origin, logs)
    except BaseException as error:
        try:
            failure.report(spec.job.dir, rank, error)
        finally:
            _leave(1)  # also where the disk is too full for a report: the parent says how this process ended


def run_joined(entry: Entry, spec: RunSpec, origin: Origin) -> Outcome:
    """Body of a rank that somebody else has started. Raises RankFailure on each rank, of which the console shows one."""
    StopFlag.installed()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        failure.clear(spec.job.dir)
    logs = Logs(failure.folder(spec.job.dir), rank, spec.config["launch"]["log_level"])
    try:
        return _work(entry, spec, origin, logs)
    except BaseException as error:
        told = _first(spec.job.dir, failure.report(spec.job.dir, rank, error))
        if told.rank == rank:
            logs.alone()
        else:
            logs.silence()
        text = failure.message(spec.job.dir, world, told)
        raise failure.RankFailure(text, told.rank, told.exit_status) from None


def _work(entry: Entry, spec: RunSpec, origin: Origin, logs: Logs) -> Outcome:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threads = _threads(spec)
    torch.set_num_threads(threads)
    logs.header(f"{_now()} rank {rank} of {world}, process {os.getpid()}, {threads} threads, started by {origin.name}")
    phase.set(step=0, phase="connect")
    _connect(spec)
    StopFlag.installed()
    if origin.board is None:
        _agree(spec, rank)
    watch = Watch(failure.folder(spec.job.dir) / failure.FIRST, origin.parent)
    watch.start()
    try:
        outcome = Outcome(summary=entry(spec))
    except RunInterrupted as stopped:
        outcome = Outcome(signum=stopped.signum, message=str(stopped))
    _disconnect()
    watch.stop()
    phase.set(step=phase.current.step, phase=phase.DONE)
    logs.header(f"{_now()} {'stopped by a signal' if outcome.signum else 'done'} after step {phase.current.step}")
    return outcome


def _connect(spec: RunSpec) -> None:
    device = Device.current()
    limit = timedelta(seconds=spec.config["launch"]["timeout"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own, store = None if device.kind == "cpu" else device.torch_device, meeting_store(rank, world, limit)
    if store is None:
        dist.init_process_group(device.backend, timeout=limit, device_id=own)
    else:
        dist.init_process_group(device.backend, timeout=limit, device_id=own, store=store, rank=rank, world_size=world)


def _agree(spec: RunSpec, rank: int) -> None:
    """Ranks that others have started plan for themselves. Raises ConfigError where they came to different plans."""
    digests: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(digests, zlib.crc32(repr(spec.plan).encode()))
    odd = [r for r, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ConfigError(
            f"rank {odd[0]} has made another plan than rank 0 (this is rank {rank}): its node differs in config, devices, or number "
            "of ranks\n    -> start the same command with the same number of ranks on every node"
        )


def _disconnect() -> None:
    if dist.is_initialized():
        dist.barrier()  # nobody closes its connections while another one still reads
        dist.destroy_process_group()


def _threads(spec: RunSpec) -> int:
    """Compute threads of this rank: as asked, or its share of the cores."""
    wanted = spec.config["launch"]["threads"]
    if wanted != "auto":
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _first(run: Path, own: failure.Failure) -> failure.Failure:
    """The failure that the run is judged by. A rank whose collective broke waits a moment: somebody else knows why."""
    first = failure.folder(run) / failure.FIRST
    end = time.monotonic() + (PATIENCE if own.echo else 0.0)
    while not first.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return failure.claim(run, own)


def _leave(status: int) -> NoReturn:
    """End the process now; threads and collectives of a failed rank may never end."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
