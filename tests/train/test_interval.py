"""When a run saves."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import commands

from partita.plan.plan import Layout
from partita.runtime.mesh import Mesh
from partita.train.interval import FIRST, SaveClock, interval


def clock(every: int | str, mtbf: float = 0.0) -> SaveClock:
    return SaveClock(every, mtbf, Mesh(Layout(), 0, torch.device("cpu")))


def test_every_so_many_steps() -> None:
    assert [s for s in range(1, 12) if clock(5).due(s)] == [5, 10]
    assert not any(clock(0).due(s) for s in range(1, 12))


def test_youngs_interval() -> None:
    """sqrt(2 C M) seconds."""
    assert interval(2.0, 0.5, 3600.0) == round(math.sqrt(2 * 2.0 * 3600.0) / 0.5) == 240
    assert interval(0.0, 10.0, 1.0) == 1
    # it is the minimum of saving costs plus work lost, C / t + t / (2 M)
    cost = {n: 2.0 / (n * 0.5) + n * 0.5 / (2 * 3600.0) for n in range(1, 2000)}
    assert min(cost, key=cost.__getitem__) == 240


def test_the_interval_is_found_at_the_first_save() -> None:
    auto = clock("auto", 3600.0)
    assert next(s for s in range(101, 120) if auto.due(s)) == 100 + FIRST
    auto.saved(110, 1e-9)
    assert not auto.due(110)
    assert auto.due(110 + auto.interval)


def test_a_run_finds_its_interval_and_its_mistakes_are_named(tmp_path: Path) -> None:
    commands.train(
        tmp_path / "run", "parallel.data=2", "train.save_every=auto", "train.mtbf=1e-3", "train.steps=14", "train.keep=99"
    )
    steps = [int(p.name[5:]) for p in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert steps[0] == FIRST and 14 in steps and len(steps) > 2
    done = commands.train(tmp_path / "no", "train.save_every=auto", check=False)
    assert done.returncode == 2 and "train.mtbf" in done.stderr
    done = commands.train(tmp_path / "no", "train.save_every=often", check=False)
    assert done.returncode == 2 and "train.save_every" in done.stderr
