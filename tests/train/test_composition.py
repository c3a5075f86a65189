"""The composition matrix: every pair of choices of every two strategies trains somewhere here, and agrees with one rank."""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("parallel", "distributed")]

from layouts import reference, train

EXPERTS = ("moe=deepseek", "moe.experts=4")
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "zero": {
        "stage0": ("zero=stage0",),
        "stage1": ("zero=stage1",),
        "stage2": ("zero=stage2",),
        "stage3": ("zero=stage3",),
        "hsdp": ("zero=hsdp",),
    },
    "offload": {"none": (), "host": ("offload=host",), "file": ("offload=file",)},
    "parallel": {
        "data": ("parallel.data=2",),
        "tensor": ("parallel.data=2", "parallel.tensor=2"),
        "context": ("parallel.data=2", "parallel.context=2"),
        "pipeline": ("parallel.data=2", "parallel.pipeline=2"),
    },
    "precision": {"fp32": ("precision=fp32",), "bf16": ("precision=bf16",)},
    "recompute": {"none": (), "full": ("recompute=full",)},
    "moe": {"dense": (), "moe": EXPERTS, "cut": (*EXPERTS, "moe.tensor=cut")},
    "compression": {"native": (), "int8": ("compression=int8",)},
}
STEPS = 4
MODEL = ("model.heads=2", "optimizer=sgd", "optimizer.lr=0.2", "train.grad_clip=0")


def pairwise_cases(seed: int = 1) -> list[dict[str, str]]:
    """Few combinations in which every two choices of different groups meet: greedy, out of random candidates."""
    draw = random.Random(seed)
    groups = list(CHOICES)
    missing = {frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(groups, 2) for x in CHOICES[a] for y in CHOICES[b]}
    cases = []
    while missing:
        fixed = dict(sorted(draw.choice(sorted(missing, key=sorted))))
        candidates = [{g: fixed.get(g) or draw.choice(list(CHOICES[g])) for g in groups} for _ in range(60)]
        best = max(candidates, key=lambda c: len(missing & pairs(c)))
        missing -= pairs(best)
        cases.append(best)
    return cases


def pairs(case: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
    """All pairs of choices in a case."""
    return {frozenset(p) for p in itertools.combinations(case.items(), 2)}


def bound(case: dict[str, str]) -> float:
    """float32 agrees to rounding; bfloat16 and int8 messages round on the way."""
    if case["precision"] == "bf16":
        return 2e-2
    return 1e-2 if case["compression"] == "int8" else 1e-5


def cases() -> list[Any]:
    """The first of them always run; the rest, which complete the pairs, on request."""
    rest = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="completes the pairs: PARTITA_LONG_TESTS=1 runs it")
    return [pytest.param(c, id="-".join(c.values()), marks=[rest] * (i >= 5)) for i, c in enumerate(pairwise_cases())]


@pytest.mark.parametrize("case", cases())
def test_composition(case: dict[str, str], tmp_path: Path) -> None:
    expert = ("parallel.expert=2",) if case["moe"] != "dense" else ()
    overrides = [o for group, choice in case.items() for o in CHOICES[group][choice]]
    got = train(tmp_path, *MODEL, *overrides, *expert, steps=STEPS)
    want = reference(*MODEL, *CHOICES["precision"][case["precision"]], *CHOICES["moe"][case["moe"]], steps=STEPS)
    assert got["losses"] == pytest.approx(want["losses"], rel=bound(case))
    assert got["norms"] == pytest.approx(want["norms"], rel=3 * bound(case))
