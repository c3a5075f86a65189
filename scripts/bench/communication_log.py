"""What the communication log costs, on and off: host time of one message without a network, and whole updates side by side.

    python scripts/bench/communication_log.py                            # messages, then updates of 2 ranks, ZeRO-3
    python scripts/bench/communication_log.py --turns 200 parallel.pipeline=2

Messages: the backend is replaced by a function that returns a finished work, so what is left is what Partita does in Python; `bare` calls that
function alone. Updates: one run with the log and one without live in the same ranks and take turns (A B A B), so that a busy machine slows
both; medians of rank 0. Other arguments are overrides.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

SMALL = (
    "model.layers=4", "model.width=64", "model.heads=4", "data=synthetic", "data.sequence=32", "train.global_batch=8", "tracker=none",
    "launch.threads=1", "train.eval_at_end=false", "train.save_at_end=false", "train.sample=0", "train.steps=1000000", "launch.ranks=2",
)  # fmt: skip


# ------------------------------------------------------------------ one message


class Finished:
    """A message that has arrived."""

    future: torch.futures.Future[None] = torch.futures.Future()

    def wait(self) -> None:
        """At once."""

    def get_future(self) -> Any:
        """Done."""
        return self.future


Finished.future.set_result(None)
FINISHED = Finished()


def finished(*tensors: Any, **options: Any) -> Finished:
    """In place of a collective of the backend."""
    return FINISHED


def microseconds(call: Callable[[], Any], repeats: int = 20_000) -> float:
    """Of one call: the best of seven rows."""
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, time.perf_counter() - start)
    return best / repeats * 1e6


def _waited(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    call(*arguments, **options).wait()


def messages() -> list[tuple[str, float, float, float]]:
    """(kind, bare, off, on), each in microseconds with its wait."""
    from partita.runtime import traffic, transport
    from partita.runtime.mesh import Group

    group, x, y = Group(("tensor",), (0, 1), 0), torch.zeros(64), torch.zeros(64)
    real = {name: getattr(dist, name) for name in ("all_to_all_single", "all_reduce", "broadcast")}
    for name in real:
        setattr(dist, name, finished)

    def layer() -> None:  # as the layers of every plug-in do it
        work = dist.all_reduce(x, group=group.process_group, async_op=True)
        traffic.sent_among(group, x, work, 2).wait()

    def blocking() -> None:
        with traffic.sending_among(group, x, 2):
            dist.all_reduce(x, group=group.process_group)

    try:
        bare = microseconds(partial(_waited, finished, x, y, group=None, async_op=True))
        off, on = (
            microseconds(partial(_waited, t.all_to_all, x, y, group, "p"))
            for t in (transport.Transport(), transport.LoggedTransport())
        )
        rows = [("engine, all-to-all", bare, off, on)]
        for kind, call in (("layer, asynchronous", layer), ("layer, blocking", blocking)):
            off = microseconds(call)
            traffic.watch(traffic.Traffic())
            rows.append((kind, bare, off, microseconds(call)))
            traffic.watch(None)
        return rows
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


# ------------------------------------------------------------------ whole updates


def side_by_side(job: tuple[Any, Any, int]) -> dict[str, float]:
    """Body of a rank: turns of a run without the log and of one with it; medians of an update, seconds, and messages of one."""
    from partita.runtime.traffic import watch
    from partita.train.loop import StepClock, one_update
    from partita.train.run import open_run

    *specs, turns = job
    runs = [open_run(spec) for spec in specs]
    updates, clocks = [run.data.iterate(1) for run in runs], [StepClock() for _ in runs]
    seconds: list[list[float]] = [[], []]
    calls = 0
    try:
        for turn in range(turns + 5):
            for i, run in enumerate(runs):
                watch(getattr(run.transport, "traffic", None))
                step, batches = next(updates[i])
                dist.barrier()
                start = time.perf_counter()
                metrics, _ = one_update(run, step, batches, clocks[i])
                if turn >= 5:
                    seconds[i].append(time.perf_counter() - start)
                run.step = step
                calls = sum(t["calls"] for t in metrics.get("communication", {}).values())
        off, on = (statistics.median(s) for s in seconds)
        return {"off": off, "on": on, "ratio": statistics.median(b / a for a, b in zip(*seconds, strict=True)), "calls": calls}
    finally:
        for run in runs:
            run.close()


def spec_of(*overrides: str) -> Any:
    """What the ranks of a run are given."""
    from partita.config.compose import compose_config, registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.spec import RunSpec

    config, info = compose_config([*SMALL, *overrides])
    planned = make_plan(config, registry_for(()))
    planned.raise_problems()
    return RunSpec(to_plain(config), planned.plan, info, planned.plan.layout.world)


def rank_of_pool(rank: int, port: int, job: tuple[Any, Any, int], out: Any) -> None:
    """Process of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job[0].ranks)
    figures = side_by_side(job)
    if rank == 0:
        out.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def updates(turns: int, overrides: list[str]) -> dict[str, float]:
    """Figures of rank 0."""
    import socket

    with tempfile.TemporaryDirectory(prefix="partita_bench_") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        specs = [
            spec_of(f"run.dir={folder}/{i}", *overrides, f"train.communication_log={v}") for i, v in enumerate(("false", "true"))
        ]
        context = torch.multiprocessing.get_context("spawn")
        out = context.SimpleQueue()
        torch.multiprocessing.spawn(rank_of_pool, (port, (*specs, turns), out), nprocs=specs[0].ranks)
        return out.get()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100, help="updates of each side")
    options, overrides = parser.parse_known_args()
    print(f"{'microseconds a message':24} {'bare':>8} {'off':>8} {'on':>8}")
    for kind, *figures in messages():
        print(f"{kind:24} " + " ".join(f"{f:8.2f}" for f in figures))
    got = updates(options.turns, overrides or ["zero.stage=3"])
    print(
        f"update of {got['calls']:g} messages: {got['off'] * 1e3:.2f} ms off, {got['on'] * 1e3:.2f} ms on, ratio {got['ratio']:.3f}"
    )


if __name__ == "__main__":
    main()
