"""The communication log of whole runs: bytes and calls of what layers send among themselves are those of the formula."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "parallel"), str(TESTS / "distributed")]

import layouts
from layouts import spec_of
from pool import run_ranks

from partita_moe.layer import FIGURES

WIDTH, TOKENS, LAYERS, VOCABULARY = 32, 8 * 16, 2, 256  # tokens of an update
LOGGED = ("train.communication_log=true", "model.dropout=0", "launch.ranks=2")
EXPERTS = (*LOGGED, "moe=mixtral", "parallel.data=2", "parallel.expert=2", "moe.experts=4", "moe.top_k=4", "train.micro_batch=2")
SPREAD = (*LOGGED, "moe=mixtral", "parallel.data=1", "parallel.tensor=2", "moe.experts=4", "moe.top_k=3", "train.micro_batch=2")
STAGES = (*LOGGED, "parallel.pipeline=2", "train.micro_batch=2", "model.tie_embeddings=true")


def tallies(rank: int, world: int, specs: list[Any]) -> list[dict[str, dict[str, float]]]:
    """Of each run, the log of this rank's second update, and that update's seconds as the purpose `step`."""
    import torch

    from partita.train.loop import StepClock, one_update
    from partita.train.run import open_run

    torch.set_num_threads(1)
    out = []
    for spec in specs:
        run, clock = open_run(spec), StepClock()
        try:
            for step, batches in run.data.iterate(1, 2):
                metrics, _ = one_update(run, step, batches, clock)
                run.step = step
            out.append(metrics["communication"] | {"step": {"seconds": metrics["seconds"]}})
        finally:
            run.close()
    return out


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, dict[str, float]]]]:
    """By rank and run: experts, experts in int8, whole experts beside a tensor axis and cut ones, stages."""
    folder = tmp_path_factory.mktemp("logs")
    runs = (EXPERTS, (*EXPERTS, "compression.expert_dispatch=int8"), SPREAD, (*SPREAD, "moe.tensor=cut"), STAGES)
    return run_ranks(2, tallies, [spec_of(folder / str(i), *overrides) for i, overrides in enumerate(runs)], timeout=120)


def assert_times(log: dict[str, dict[str, float]], purpose: str) -> None:
    tally = log[purpose]
    assert 0 < tally["exposed"] <= log["step"]["seconds"] and 0 < tally["seconds"] <= log["step"]["seconds"]


def test_rows_of_experts(logs: Any) -> None:
    """Every token goes to all four experts, so half of the rows leave: there and back, and their gradients; counts are int64 [E]."""
    rows, micro_batches = TOKENS // 2 * 4 // 2, 2
    for rank in logs:
        for log, row in zip(rank[:2], (WIDTH * 4, WIDTH + 4), strict=True):
            tally = log["expert_dispatch"]
            assert tally["bytes"] == LAYERS * (4 * rows * row + micro_batches * 4 * 8 // 2)
            assert tally["calls"] == LAYERS * micro_batches * (4 + 1)
            assert_times(log, "expert_dispatch")
            assert log["expert_load"]["bytes"] == LAYERS * (4 + len(FIGURES)) * 8


def test_sums_of_cut_experts(logs: Any) -> None:
    """On top of what whole experts need: answers forward and gradients of tokens backward, as large as tokens, and gradients of gates."""
    for rank in logs:
        whole, cut = (log["tensor"]["bytes"] for log in rank[2:4])
        assert cut - whole == LAYERS * TOKENS * (2 * WIDTH + 3) * 4
    told = [layouts.planned(*SPREAD, *more)[0] for more in ((), ("moe.tensor=cut",))]
    whole, cut = (sum(c.bytes for c in planned.costs if c.what == "activations over tensor") for planned in told)
    assert cut - whole == LAYERS * TOKENS * 2 * WIDTH * 4


def test_activations_and_gradients_between_stages(logs: Any) -> None:
    """Each stage sends as much as the other; shapes went ahead of the run's first micro-batch only. The embedding is on both stages."""
    for *_, log in logs:
        assert log["pipeline"]["bytes"] == TOKENS * WIDTH * 4
        assert log["pipeline"]["calls"] == 4
        assert log["control"]["bytes"] == 16
        assert_times(log, "pipeline")
        assert 0 <= log["gradient_reduce"]["bytes"] - VOCABULARY * WIDTH * 4 < 1000  # and a norm
