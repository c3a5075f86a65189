"""`partita.prepare`: equal to a plain loop at every stage, several at once, states within reach, mistakes told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import sessions
from pool import run_ranks

import partita
from partita.errors import ConfigError, PartitaError

ROOT = Path(__file__).parents[2]


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "accumulate", "fine"), [(1, 1, False), (2, 1, False), (2, 2, True)])
def test_a_session_trains_as_a_plain_loop(stage: int, world: int, accumulate: int, fine: bool) -> None:
    losses, norms, weights, gradients = sessions.plain()
    for ours in run_ranks(world, sessions.train, stage, accumulate, fine):
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(norms, rel=1e-5)
        close(ours[2], weights)
        close(ours[3], gradients)
        assert ours[4].shape == weights["enter.weight"].shape and ours[4].abs().sum() > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weighted_loss_counts_items_not_ranks(stage: int) -> None:
    whole = run_ranks(1, sessions.weighted, stage)[0]
    for ours in run_ranks(2, sessions.weighted, stage):
        assert ours[0] == pytest.approx(whole[0], rel=1e-6)
        close(ours[1], whole[1])


def test_frozen_norms_are_there_when_a_block_is_recomputed_and_go_again() -> None:
    for ours, plain, whole in run_ranks(2, sessions.frozen_norms):
        close(ours, plain)
        assert whole <= 2  # the next one to be used, and one ahead


def test_two_sessions_interleaved_are_as_two_alone() -> None:
    alone = run_ranks(1, sessions.two, False)[0]
    for ours in run_ranks(2, sessions.two, True):
        torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(alone[0]), rtol=1e-5, atol=0)
        assert ours[1] == pytest.approx(alone[1], rel=1e-5)
        close(ours[2], alone[2])
        close(ours[3], alone[3])
        assert ours[1][-1] < ours[1][0]


def test_a_checkpoint_of_one_plan_loads_in_another(tmp_path: Path) -> None:
    for losses, updates in run_ranks(2, sessions.stored, str(tmp_path / "saved")):
        assert losses[0] == pytest.approx(losses[1], rel=1e-6) and updates == 3


def test_without_a_process_group_and_with_a_model_of_ours_on_meta() -> None:
    from partita.config.compose import compose_config
    from partita.models.gpt import make_gpt

    config, _ = compose_config(["model.layers=2", "model.width=16", "model.heads=2", "data.sequence=8"])
    with torch.device("meta"):
        model = make_gpt(config, 32)
    session = partita.prepare(model, ["+strategy=zero3", "optimizer.lr=0.01", "lr_schedule=constant"])
    ids = torch.arange(16).reshape(2, 8)

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    losses = [session.step(ids, loss).loss for _ in range(5)]
    assert losses[-1] < losses[0] and session.updates == 5


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match=r"zero\.stge"):
        partita.prepare(sessions.Net(0), {"zero.stge": 3})
    with pytest.raises(ConfigError, match="parallel"):
        partita.prepare(sessions.Net(0), {"parallel.pipeline": 2})
    session = partita.prepare(sessions.Net(0), {"parallel.microbatches": 2})
    with pytest.raises(PartitaError, match="list of 2 micro-batches"):
        session.step([sessions.batch(0)], sessions.mse)
    with pytest.raises(PartitaError, match="0 of 2 backward passes"):
        session.step()
    with pytest.raises(PartitaError, match="needs a loss_fn"):
        session.step(sessions.batch(0))
    with pytest.raises(PartitaError, match="no parameter is called"):
        session.parameter("nothing")


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_distillation_example_runs_alone_and_under_torchrun(ranks: int, tmp_path: Path) -> None:
    start = (
        [sys.executable]
        if not ranks
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    done = subprocess.run([*start, str(ROOT / "examples/distillation.py")], capture_output=True, text=True, cwd=tmp_path, timeout=150,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("the student's loss fell"), done.stdout
