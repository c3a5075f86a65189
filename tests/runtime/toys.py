"""Small things that ranks do in the tests of launching, with a command line: `python toys.py ENTRY FOLDER [key=value]`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.config.job import JobInfo
from partita.errors import PartitaError, RunInterrupted
from partita.plan.plan import Plan
from partita.runtime import phase
from partita.runtime.launch import launch
from partita.runtime.phase import DONE
from partita.runtime.signals import StopFlag, signal_of
from partita.runtime.spec import RunSpec


def make_spec(folder: Path, ranks: int, **extra: Any) -> RunSpec:
    options: dict[str, Any] = {"threads": 1, "timeout": 60.0, "grace": 10.0, "log_level": "info"}
    options |= {key: extra.pop(key) for key in list(extra) if key in options}
    return RunSpec({"launch": options, "toy": extra}, Plan(), JobInfo(dir=folder, name=folder.name), ranks)


def loop(spec: RunSpec) -> dict[str, Any]:
    """All-reduce until a signal comes or `steps` are made; what goes wrong, and when and where, is in `spec.config["toy"]`."""
    toy = spec.config["toy"]
    rank, folder = dist.get_rank(), spec.job.dir
    print(f"hello from rank {rank}", flush=True)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    for step in range(1, int(toy.get("steps", 10**9)) + 1):
        phase.set(step=step, phase="train")
        if step == int(toy.get("at", 5)) and rank == int(toy.get("rank", 1)):
            _go_wrong(str(toy.get("how", "")))
        signum = _step(toy)
        if rank == 0:
            (folder / "step").write_text(str(step))
        if signum:
            time.sleep(float(toy.get("saving", 0)))
            (folder / f"saved{rank}").write_text(str(step))
            raise RunInterrupted(signum, f"stopped by signal {signum} after step {step}")
    return {"rank": rank, "world": dist.get_world_size(), "threads": torch.get_num_threads()}


def _step(toy: dict[str, Any]) -> int:
    values = torch.tensor([1, StopFlag.installed().local()], dtype=torch.int64)
    dist.all_reduce(values)
    time.sleep(float(toy.get("pause", 0.02)))
    return signal_of(int(values[1]))


def _go_wrong(how: str) -> None:
    if how == "raise":
        raise ValueError("the numbers are odd")
    if how == "refuse":
        error = PartitaError("data.path: there is nothing")
        error.exit_status = 2
        raise error
    if how == "exit":
        os._exit(7)
    if how == "zero":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(1000)
    if how == "lone":
        phase.set(step=5, phase="save")
        dist.barrier()


def where(spec: RunSpec) -> dict[str, Any]:
    """What a rank finds around it."""
    import logging

    logging.getLogger("partita").info("logged by rank %d", dist.get_rank())
    os.system("echo from a subprocess")
    return {
        "stdin": os.readlink("/proc/self/fd/0"),
        "modules": "torch._dynamo" in sys.modules,
        "entered": time.time(),
        "cwd": os.getcwd(),
    }


def early(spec: RunSpec) -> dict[str, Any]:
    """As `loop`; `main` sees to it that a rank is killed before it has told its process id."""
    return loop(spec)


def _die_early(victim: int) -> None:
    told = phase.share

    def share(board: Path, rank: int) -> None:
        if rank == victim:
            time.sleep(0.5)  # the other one waits for it by then
            os.kill(os.getpid(), signal.SIGKILL)
        told(board, rank)

    phase.share = share


def late(spec: RunSpec) -> dict[str, Any]:
    """As `loop`; `main` sees to it that a rank is killed when all its work is done."""
    return loop(spec)


def _die_late(victim: int) -> None:
    told = phase.set

    def note(*, step: int, phase: str) -> None:
        told(step=step, phase=phase)
        if phase == DONE and int(os.environ["RANK"]) == victim:
            time.sleep(0.5)  # the other one is done, too
            os.kill(os.getpid(), signal.SIGKILL)

    phase.set = note


def sweep(folder: Path) -> int:
    """Three jobs of one process, the second of which fails."""
    results: list[Any] = []
    for job, how in enumerate(("", "raise", "")):
        path = folder / str(job)
        path.mkdir(parents=True)
        try:
            results.append(launch(loop, make_spec(path, 2, how=how, steps=8, pause=0), 2)["world"])
        except PartitaError as error:
            results.append(str(error))
    handlers = [signal.getsignal(s) is signal.default_int_handler for s in (signal.SIGINT,)]
    print(
        json.dumps({"results": results, "handlers": handlers, "leaked": [k for k in os.environ if k.startswith("TORCHELASTIC")]})
    )
    return 0


def main() -> int:
    entry, folder, *pairs = sys.argv[1:]
    extra = dict(pair.split("=", 1) for pair in pairs)
    ranks = int(extra.pop("ranks", os.environ.get("WORLD_SIZE", "2")))
    options: dict[str, Any] = {k: float(v) if k in ("grace", "timeout") else v for k, v in extra.items()}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if entry == "sweep":
        return sweep(path)
    if entry == "early":
        _die_early(int(extra["rank"]))
    if entry == "late":
        _die_late(int(extra["rank"]))
    started = time.time()
    try:
        summary = launch(globals()[entry], make_spec(path, ranks, **options), ranks)
    except PartitaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_status
    print(json.dumps(summary | {"started": started, "over": time.time()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
