"""Several axes in one mesh, with cut states, schedules and tiers, against one rank (all of them: scripts/bench/layouts.py)."""

from __future__ import annotations

import os

import pytest
from combinations import all_cases, off, run_cases
from layouts import STEPS, reference

FEW = (
    "3d zero2 zbv",
    "sequence 3d zero3 interleaved",
    "context x pipeline x shard zero2 zbv",
    "3d zero3 host",
    "hsdp x pipeline 1f1b",
)
LONG = "PARTITA_LONG_TESTS" in os.environ


@pytest.mark.timeout(900)
def test_losses_norms_and_evaluation_are_those_of_one_rank(tmp_path):
    cases = [case for case in all_cases() if case.name in FEW]
    assert len(cases) == len(FEW)
    found = {}
    for case, got in zip(cases, run_cases(cases, tmp_path, STEPS, limit=60.0), strict=True):
        found[case.name] = max(off(got, reference(*case.model, steps=STEPS)))
    assert max(found.values()) <= 1e-5, found


@pytest.mark.skipif(not LONG, reason="PARTITA_LONG_TESTS=1 runs it")
def test_every_combination_can_be_planned():
    from layouts import planned

    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names) >= 80
    assert {c.name: p for c in all_cases() if (p := planned(*c.model, *c.layout)[0].problems)} == {}
