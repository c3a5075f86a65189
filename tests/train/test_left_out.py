"""Failures that others had with going on from a checkpoint: state that was lost, mixed up, or asked for in vain."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "distributed"),
    str(Path(__file__).parents[1] / "state"),
]

import engine_runs
import layout_matrix
from pool import RankError, run_ranks
from reference import Model

from partita.plugin.registry import Registry
from partita.runtime.rng import get_rng_state, set_rng_state
from partita.train import resume
from partita.train.checkpoint import Checkpointer, inspect

OPTIMIZERS = sorted(Registry.load(()).slots()["optimizer"])


# ------------------------------------------------------------------ what is left out on purpose


def pretend(engine: Any, folder: Path, **options: Any) -> Any:
    """As much of a run as saving and loading look at."""
    train = {"save_optimizer": True, "save_frozen": True, "resume_optimizer": True, "resume_partial": False, **options}
    return SimpleNamespace(
        engine=engine, mesh=engine.mesh, rank=engine.mesh.rank, config=SimpleNamespace(train=SimpleNamespace(**train)),
        checkpoints=Checkpointer(folder, engine.mesh, asynchronous=False),
    )  # fmt: skip


def frozen_norm() -> torch.nn.Module:
    """The odd model, its last norm frozen."""
    model = Model()
    model.norm.requires_grad_(False)
    return model


def save_run(rank: int, world: int, placement: str, folder: str, options: dict[str, Any]) -> None:
    engine = engine_runs.make_engine(rank, engine_runs.make_plan(world, placement), "adamw", frozen_norm())
    engine_runs.step(engine, 0, 12, rank, 1e-2, 1.0)
    run = pretend(engine, Path(folder), **options)
    slices, left_out = resume._kept(run, engine.save_slices())
    run.checkpoints.save(1, slices, {"left_out": left_out}, {})


def load_run(rank: int, world: int, placement: str, folder: str, options: dict[str, Any]) -> tuple[float, list[str]]:
    """(largest moment after the load, names that were left alone)."""
    engine = engine_runs.make_engine(rank, engine_runs.make_plan(world, placement), "adamw", frozen_norm())
    run = pretend(engine, Path(folder), **options)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("partita").addHandler(handler)
    try:
        resume.load(run, Path(folder))
    finally:
        logging.getLogger("partita").removeHandler(handler)
    states = [s.data for s in engine.load_slices() if s.key.endswith(".exp_avg") and s.data.numel()]
    moments = [float(values.abs().max()) for values in states]
    return max(moments), records


@pytest.mark.parametrize("placement", list(engine_runs.PLACEMENTS))
def test_frozen_weights_stay_out_for_every_placement_or_for_none(placement: str, tmp_path: Path) -> None:
    run_ranks(2, save_run, placement, str(tmp_path / "all"), {})
    run_ranks(2, save_run, placement, str(tmp_path / "some"), {"save_frozen": False})
    with_frozen, without = inspect(tmp_path / "all")["tensors"], inspect(tmp_path / "some")["tensors"]
    frozen = sorted(set(with_frozen) - set(without))
    assert frozen
    assert [f"model.{n}" for n in inspect(tmp_path / "some")["extra"]["left_out"]["frozen"]] == frozen
    records = run_ranks(2, load_run, placement, str(tmp_path / "some"), {})[0][1]
    assert any("left out on purpose" in r and frozen[0] in r for r in records)
    assert run_ranks(2, load_run, placement, str(tmp_path / "all"), {})[0][1] == []


def test_a_checkpoint_without_the_optimizer(tmp_path: Path) -> None:
    """Weights are loaded and the rest is listed; asked for with the optimizer, the error says what to do."""
    run_ranks(2, save_run, "gradients", str(tmp_path), {"save_optimizer": False})
    assert not any(k.startswith("optimizer.") for k in inspect(tmp_path)["tensors"])
    with pytest.raises(RankError, match=r"train\.resume_optimizer=false"):
        run_ranks(1, load_run, "gradients", str(tmp_path), {})
    largest, records = run_ranks(2, load_run, "parameters", str(tmp_path), {"resume_optimizer": False})[0]
    assert largest == 0.0
    assert any("optimizer." in r and "left out on purpose" in r for r in records)


def test_the_optimizer_can_be_dropped_while_loading(tmp_path: Path) -> None:
    run_ranks(2, save_run, "gradients", str(tmp_path), {})
    assert run_ranks(2, load_run, "gradients", str(tmp_path), {})[0][0] > 0
    assert run_ranks(2, load_run, "gradients", str(tmp_path), {"resume_optimizer": False})[0][0] == 0.0


# ------------------------------------------------------------------ streams of random numbers


def draw(count: int) -> list[Any]:
    import random

    import numpy as np

    return [(random.random(), float(np.random.rand()), float(torch.rand(1))) for _ in range(count)]


def streams(rank: int, world: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Five draws after the save, and five after loading it."""
    import random

    import numpy as np

    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    draw(3)
    engine = engine_runs.make_engine(rank, engine_runs.make_plan(world, "replicated"), "sgd")
    made = Checkpointer(folder, engine.mesh, asynchronous=False)
    made.save(1, engine.save_slices(), {}, {"rng": get_rng_state()})
    first = draw(5)
    draw(7)
    _, own = made.load(folder, [])
    assert own is not None
    set_rng_state(own["rng"])
    return first, draw(5)


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    (first0, again0), (first1, again1) = run_ranks(2, streams, str(tmp_path))
    assert first0 == again0
    assert first1 == again1
    assert all(a != b for a, b in zip(first0, first1, strict=True))


# ------------------------------------------------------------------ every update rule


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_agree_after_a_load_with_every_optimizer(name: str, tmp_path: Path) -> None:
    """ZeRO-1: what was loaded is what was saved, and the next losses are those of the run that went on."""
    if name.startswith("torchao") and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao isn't installed")
    layout = ("+strategy=zero1", "parallel.data=2", f"optimizer.name={name}", "optimizer.lr=1e-3")
    losses = layout_matrix.write(layout, tmp_path / "source")
    if isinstance(losses, str):
        pytest.skip(f"refused: {losses}")
    assert layout_matrix.move(layout, tmp_path / "source", tmp_path / "again", losses) == []
