"""The engine against the plain loop, for every placement."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import engine_runs
import reference
from pool import run_ranks

STEPS, SIZE = 20, 16
CASES = [(p, w, m, 1) for p in engine_runs.PLACEMENTS for w, m in ((1, 1), (2, 1), (2, 4), (4, 1), (4, 4))]
CASES += [("parameters", 4, 2, 2), ("gradients", 4, 1, 2), ("optimizer", 4, 4, 2)]
CASES += [(p, 4, 4, 2) for p in engine_runs.NARROWER] + [("hpz", 4, 1, 2), ("hfsdp", 4, 1, 2)]


@lru_cache
def oracle(rule: str, clip: float):
    return reference.train(rule, STEPS, SIZE, clip)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize(("placement", "world", "micro", "replicate"), CASES)
def test_matches_the_plain_loop(placement: str, world: int, micro: int, replicate: int, rule: str) -> None:
    clip = 0.5 if rule == "adamw" else 0.0
    losses, norms, weights = oracle(rule, clip)
    plan = {"micro_batches": micro, "replicate": replicate}
    for got in run_ranks(world, engine_runs.run, placement, rule, STEPS, SIZE, clip, kwargs=plan, timeout=120):
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(losses), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(norms), rtol=1e-5, atol=0)
        for name, value in weights.items():
            torch.testing.assert_close(got[2][name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(got[3][name], got[2][name], rtol=0, atol=0)


def test_unused_and_frozen_parameters_do_not_move() -> None:
    start = {n: p.detach().clone() for n, p in reference.Model().named_parameters()}
    _, _, weights, _ = run_ranks(2, engine_runs.run, "parameters", "sgd", 5, SIZE, 0.0, timeout=60)[0]
    for name in ("blocks.0.unused", "blocks.2.frozen.weight", "blocks.1.frozen.bias"):
        assert torch.equal(weights[name], start[name]), name
    assert not torch.equal(weights["blocks.0.gain"], start["blocks.0.gain"])
    assert weights["blocks.0.empty"].shape == (0,)
