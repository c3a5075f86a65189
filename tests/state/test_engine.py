"""The engine against the plain loop, for every placement."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import engine_runs
import reference
from pool import run_ranks

STEPS, SIZE = 20, 16
CLIP = {"adamw": 0.5, "sgd": 0.0}
CASES = [(p, w, m, 1) for p in engine_runs.PLACEMENTS for w, m in ((1, 1), (2, 1), (2, 4), (4, 1), (4, 4))]
CASES += [("parameters", 4, 2, 2), ("gradients", 4, 1, 2), ("optimizer", 4, 4, 2)]
CASES += [(p, 4, 4, 2) for p in engine_runs.NARROWER] + [("hpz", 4, 1, 2), ("hfsdp", 4, 1, 2)]


@lru_cache
def oracle(rule: str, clip: float):
    return reference.train(rule, STEPS, SIZE, clip)


# AdamW forgives gradients of a wrong scale, which norms show; SGD doesn't, and the ways to cut are alike in that
BY_SGD = [(p, 2, 4, 1) for p in engine_runs.PLACEMENTS] + [("hpz", 4, 4, 2), ("hfsdp", 4, 1, 2)]
LONG = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="each case by SGD too: PARTITA_LONG_TESTS=1 runs it")
RUNS = [(*case, "adamw") for case in CASES] + [(*case, "sgd") for case in BY_SGD]
RUNS += [pytest.param(*case, "sgd", marks=LONG) for case in CASES if case not in BY_SGD]


@lru_cache
def outcome(placement: str, world: int, micro: int, replicate: int, rule: str) -> list[Any]:
    plan = {"micro_batches": micro, "replicate": replicate}
    return run_ranks(world, engine_runs.run, placement, rule, STEPS, SIZE, CLIP[rule], kwargs=plan, timeout=120)


@pytest.mark.parametrize(("placement", "world", "micro", "replicate", "rule"), RUNS)
def test_matches_the_plain_loop(placement: str, world: int, micro: int, replicate: int, rule: str) -> None:
    losses, norms, weights = oracle(rule, CLIP[rule])
    for got in outcome(placement, world, micro, replicate, rule):
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(losses), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(norms), rtol=1e-5, atol=0)
        for name, value in weights.items():
            torch.testing.assert_close(got[2][name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(got[3][name], got[2][name], rtol=0, atol=0)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("micro", [1, 4])
def test_the_norm_of_gradients_that_arrive_at_one_rank(micro: int, rule: str) -> None:
    arguments = ("replicated", rule, STEPS, SIZE, CLIP[rule], micro)
    losses, norms, weights = oracle(rule, CLIP[rule])
    found = run_ranks(1, engine_runs.run_alone, *arguments, timeout=120)[0]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(norms), rtol=1e-6, atol=0)
    for name, value in weights.items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=2e-6)
    assert found[4] == 0  # no pass of its own


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("micro", [1, 4])
def test_stages_that_sum_in_one_order_are_equal_bit_by_bit(world: int, micro: int) -> None:
    """With several micro-batches stage 1 sums them before the ranks do, stages 2 and 3 after."""
    alike = ["gradients", "parameters", *(["optimizer"] if micro == 1 else [])]
    one, *others = [outcome(placement, world, micro, 1, "adamw")[0] for placement in alike]
    for other in others:
        assert other[:2] == one[:2]
        assert all(torch.equal(other[2][name], value) for name, value in one[2].items())


def test_unused_and_frozen_parameters_do_not_move() -> None:
    start = {n: p.detach().clone() for n, p in reference.Model().named_parameters()}
    _, _, weights, _ = run_ranks(2, engine_runs.run, "parameters", "sgd", 5, SIZE, 0.0, timeout=60)[0]
    for name in ("blocks.0.unused", "blocks.2.frozen.weight", "blocks.1.frozen.bias"):
        assert torch.equal(weights[name], start[name]), name
    assert not torch.equal(weights["blocks.0.gain"], start["blocks.0.gain"])
    assert weights["blocks.0.empty"].shape == (0,)
