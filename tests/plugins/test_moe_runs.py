"""Experts on several ranks through the command line: the same training for every degree and with every other strategy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "train")]

import commands

MODEL = (
    "moe.experts=4",
    "model.dropout=0.1",
    "optimizer=sgd",
    "optimizer.lr=0.3",
    "train.grad_clip=0",
    "train.save_every=6",
    "train.keep=9",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One rank, for each routing."""
    folder = tmp_path_factory.mktemp("moe")
    for name in ("mixtral", "deepseek"):
        commands.train(folder / name, "parallel.data=1", f"moe={name}", *MODEL)
    return {name: folder / name for name in ("mixtral", "deepseek")}


@pytest.mark.parametrize(
    ("routing", "overrides"),
    [
        ("mixtral", ("parallel.data=2", "parallel.expert=2", "zero.stage=0")),
        ("mixtral", ("parallel.data=4", "parallel.expert=2", "zero.stage=3", "train.micro_batch=1")),
        ("deepseek", ("parallel.data=4", "parallel.expert=4", "zero.stage=2", "recompute=full")),
        ("mixtral", ("parallel.data=2", "parallel.expert=2", "zero.stage=1", "parallel.tensor=2")),
        ("deepseek", ("parallel.data=4", "parallel.expert=1", "zero.stage=3")),
    ],
    ids=str,
)
def test_every_degree_gives_the_same_training(
    reference: dict[str, Path], tmp_path: Path, routing: str, overrides: tuple[str, ...]
) -> None:
    commands.train(tmp_path / "run", *overrides, f"moe={routing}", *MODEL)
    for name in ("loss", "grad_norm"):
        assert commands.column(tmp_path / "run", name) == pytest.approx(commands.column(reference[routing], name), rel=1e-5)
    last = commands.metrics(tmp_path / "run")[-1]
    assert last["moe_load"] == commands.metrics(reference[routing])[-1]["moe_load"]


def test_the_number_of_expert_ranks_may_change(reference: dict[str, Path], tmp_path: Path) -> None:
    """Experts and the balancing bias come out of a checkpoint of one rank and go on on four."""
    resume = f"train.resume={reference['deepseek']}/checkpoints/step-00000006"
    commands.train(tmp_path / "run", "parallel.data=4", "parallel.expert=4", "zero.stage=3", "moe=deepseek", *MODEL, resume)
    want = commands.column(reference["deepseek"], "loss")[6:]
    assert commands.column(tmp_path / "run", "loss") == pytest.approx(want, rel=1e-5)
