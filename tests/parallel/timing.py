"""How long steps of a run take, measured on ranks that are there already."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from partita.runtime.spec import RunSpec

WARM, TIMED = 2, 5  # updates before the clock runs, and updates that count


def step_seconds(rank: int, world: int, spec: RunSpec, hopeless: float) -> float:
    """Median seconds of an update. Where the last one of the warm-up takes longer than `hopeless` that is all, and its time is returned."""
    from partita.train.loop import StepClock, one_update
    from partita.train.run import open_run

    torch.set_num_threads(1)
    run = open_run(spec)
    seconds, clock = [], StepClock()
    try:
        for step, batches in run.data.iterate(1, WARM + TIMED):
            begun = time.perf_counter()
            one_update(run, step, batches, clock)
            run.step = step
            seconds.append(time.perf_counter() - begun)
            if step == WARM and _slowest(seconds[-1]) > hopeless:
                return _slowest(seconds[-1])
        return _slowest(statistics.median(seconds[WARM:]))
    finally:
        run.close()


def _slowest(seconds: float) -> float:
    """Over all ranks: the same on all of them."""
    value = torch.tensor([seconds], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
