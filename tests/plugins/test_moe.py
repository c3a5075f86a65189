"""Dense models only, and a clear answer to all else."""

from __future__ import annotations

import pytest


def test_none(plan_of):
    assert not plan_of(moe__name="none").problems


@pytest.mark.parametrize(("name", "words"), [("switch", "is not in this version"), ("swich", "is no routing")])
def test_experts_are_refused(plan_of, name, words):
    (found,) = plan_of(moe__name=name).problems
    assert found.key == "moe.name" and words in found.reason and "none" in found.remedy


def test_expert_axis_without_experts(plan_of):
    found = plan_of(parallel__data=2, parallel__expert=2).problems
    assert any("makes a model without experts" in p.reason for p in found)
