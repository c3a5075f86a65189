"""Memory does not grow: after each update as many tensors are alive as before, whatever autograd functions take part."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import growth_runs
from pool import run_ranks

LONG = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="more combinations: PARTITA_LONG_TESTS=1 runs them")
SLACK = 2  # small values that are replaced by newer ones now and then


@pytest.mark.parametrize(
    "overrides",
    [
        ("moe=deepseek", "moe.experts=4", "parallel.expert=2", "zero.stage=3", "recompute=full"),
        pytest.param(("moe=mixtral", "moe.experts=4", "parallel.expert=2", "zero.stage=1"), marks=LONG),
        pytest.param(("parallel.tensor=2", "zero.stage=0"), marks=LONG),
        ("parallel.context=2", "zero.stage=2"),
        ("parallel.pipeline=2", "parallel.schedule=zbv", "train.micro_batch=2"),
        pytest.param(("zero.stage=3", "compression=int8", "+adapter=lora"), marks=LONG),
    ],
    ids=" ".join,
)
def test_no_tensor_is_held_for_ever(overrides: tuple[str, ...]) -> None:
    for early, late in run_ranks(2, growth_runs.live_tensors, list(overrides), (3, 7), timeout=90):
        assert late <= early + SLACK
