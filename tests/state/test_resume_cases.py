"""Public failure reports about states that do not survive a save and a load, for every placement."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import cases
import engine_runs
from pool import run_ranks

from partita.config.schema import OptimizerConfig
from partita.plan.plan import LossScale, Precision
from partita.state.engine import StateEngine
from partita.train.checkpoint import Checkpointer

PLACEMENTS = list(engine_runs.PLACEMENTS)
FP16 = Precision("float16", "float32", "float32", "float32", loss_scale=LossScale(initial=1024.0, interval=8))


def save(engine: StateEngine, folder: str) -> None:
    c = Checkpointer(folder, engine.mesh)
    c.save(engine.updates, engine.save_slices(), engine.extra_state(), {})
    c.wait()


def load(engine: StateEngine, folder: str) -> StateEngine:
    extra, _ = Checkpointer(folder, engine.mesh).load(Path(folder), engine.load_slices())
    engine.after_load()
    engine.load_extra_state(extra)
    return engine


def step(engine: StateEngine, loss: torch.Tensor) -> None:
    engine.begin_step()
    engine.backward(loss / engine.plan.layout.world, last=True)
    cases.update(engine, [], 0.1)


# ------------------------------------------------------------------ frozen weights


def with_frozen(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(35.0).view(7, 5) if seed == 0 else torch.randn(7, 5))
    model[0].requires_grad_(False)
    return model


def save_frozen(rank: int, world: int, placement: str, folder: str) -> None:
    engine = cases.engine_for(rank, world, placement, with_frozen(0), cases.sgd())
    step(engine, engine.model(torch.ones(2, 5)).square().sum())
    save(engine, folder)


def load_frozen(rank: int, world: int, placement: str, folder: str) -> torch.Tensor:
    return load(cases.engine_for(rank, world, placement, with_frozen(1), cases.sgd()), folder).full_tensor("0.weight")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_frozen_weights_come_back(placement: str, tmp_path: Path) -> None:
    run_ranks(2, save_frozen, placement, str(tmp_path))
    for world in (2, 1, 4):
        for got in run_ranks(world, load_frozen, placement, str(tmp_path)):
            assert torch.equal(got, torch.arange(35.0).view(7, 5))


# ------------------------------------------------------------------ moments and counts


def adam(world: int, rank: int, placement: str, precision: Precision) -> StateEngine:
    config = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.0, betas=(0.9, 0.999))
    return cases.engine_for(rank, world, placement, cases.Scalars(w=0.0), config, precision=precision)


def half_way(rank: int, world: int, placement: str, precision: Precision, folder: str) -> float:
    engine = adam(world, rank, placement, precision)
    for g in (1.0, -1.0):
        step(engine, engine.model(g))
    save(engine, folder)
    again = load(adam(world, rank, placement, precision), folder)
    for g in (1.0, 1.0):
        step(again, again.model(g))
    return float(again.full_tensor("w"))


def by_hand(gradients: list[float]) -> float:
    w = torch.zeros((), requires_grad=True)
    rule = torch.optim.AdamW([w], lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    for g in gradients:
        w.grad = torch.tensor(g)
        rule.step()
    return float(w.detach())


@pytest.mark.parametrize("precision", [engine_runs.FP32, engine_runs.BF16, FP16], ids=lambda p: p.compute)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_moments_and_counts_go_on(placement: str, precision: Precision, tmp_path: Path) -> None:
    want = by_hand([1.0, -1.0, 1.0, 1.0])
    assert want == pytest.approx(-0.1812, abs=1e-4)  # -0.2947 where the state is lost
    for got in run_ranks(2, half_way, placement, precision, str(tmp_path)):
        assert got == pytest.approx(want, abs=1e-5)


# ------------------------------------------------------------------ loss scale


def scale_after_load(rank: int, world: int, placement: str, folder: str) -> list[tuple[object, ...]]:
    """Of the run that saved, of a fresh engine, and of one that has trained."""
    engine = adam(world, rank, placement, FP16)
    for _ in range(7):
        step(engine, engine.model(1.0))
    save(engine, folder)
    trained = adam(world, rank, placement, replace(FP16, loss_scale=LossScale(initial=4.0, interval=2)))
    for _ in range(3):
        step(trained, trained.model(1.0))
    loaded = [engine, load(adam(world, rank, placement, FP16), folder), load(trained, folder)]
    return [(e.updates, *e.scaler.state().values()) for e in loaded]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_loading_moves_no_loss_scale_and_counts_no_step(placement: str, tmp_path: Path) -> None:
    for saved, fresh, trained in run_ranks(2, scale_after_load, placement, str(tmp_path)):
        assert saved == (7, 1024.0, 7, 0, 0)
        assert fresh == trained == saved
