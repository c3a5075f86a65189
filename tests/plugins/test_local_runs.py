"""Groups that train for themselves: a run that is stopped between two meetings, or at one, goes on as if nothing had been."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "parallel"), str(TESTS / "distributed")]

from layouts import spec_of
from pool import run_ranks

from partita.train.index import read_index
from partita.train.loading import read_weights

DILOCO = ("local.every=4", "local.method=diloco", "local.format=int8", "parallel.replicate=2", "model.dropout=0")
FOUR = (*DILOCO, "launch.ranks=4", "parallel.shard=2", "zero.preset=hsdp")
TWO = (*DILOCO, "launch.ranks=2", "zero.stage=0")


def train(rank: int, world: int, spec: Any, until: int, saves: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the updates that are left, and this rank's group's weights and moments after the last one."""
    from partita.train.loop import StepClock, one_update
    from partita.train.resume import save
    from partita.train.run import open_run

    torch.set_num_threads(1)
    run, clock, losses = open_run(spec), StepClock(), []
    try:
        run.notify("partita_run_start")
        for step, batches in run.data.iterate(run.step + 1, until):
            metrics, _ = one_update(run, step, batches, clock)
            run.step = step
            run.notify("partita_step_end", step=step, metrics=metrics)
            losses.append(metrics["loss"])
            if step in saves:
                save(run)
                run.checkpoints.wait()
        states = {s.key: s.data.clone() for s in run.engine.load_slices()}
        return losses, states
    finally:
        run.close()


def differs(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [k for k in one if not torch.equal(one[k], other[k])]


def test_a_stop_between_meetings_changes_nothing(tmp_path: Path) -> None:
    """Stopped after update 6, between the meetings of 4 and 8, and after 8: at update 9 weights, moments, errors and DiLoCo's momentum are
    those of the uninterrupted run to the bit."""
    whole = run_ranks(4, train, spec_of(tmp_path, *FOUR, "train.keep=2"), 9, (6, 8), timeout=120)
    between, meeting = (tmp_path / "checkpoints" / f"step-{n:08d}" for n in (6, 8))
    for step, path in ((6, between), (8, meeting)):
        again = run_ranks(4, train, spec_of(tmp_path / f"from{step}", *FOUR, f"train.resume={path}"), 9, (), timeout=120)
        for (losses, states), (want, expected) in zip(again, whole, strict=True):
            assert losses == want[step:]
            assert differs(states, expected) == []
    first, second = (whole[i][1] for i in (0, 2))  # the same place in two groups: apart after update 9
    assert any(not torch.equal(value, second[key]) for key, value in first.items() if key.startswith("model."))
    # fewer ranks, the same groups: before the meeting within rounding, after it within that of int8
    two = run_ranks(2, train, spec_of(tmp_path / "two", *TWO, f"train.resume={between}"), 9, (), timeout=120)
    assert two[0][0][:2] == pytest.approx(whole[0][0][6:8], rel=1e-6)
    assert two[0][0] == pytest.approx(whole[0][0][6:], rel=1e-3)
    own = [sum(k.startswith("own.1of2.model.") for k in read_index(path).tensors) for path in (between, meeting)]
    assert own[0] and not own[1]  # at a meeting weights are stored once
    assert set(read_weights(between)) == set(read_weights(meeting))
