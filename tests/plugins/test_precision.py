"""Rows by name, dtypes by hand, loss scale."""

from __future__ import annotations

import pytest

from partita.plan.plan import LossScale


@pytest.mark.parametrize(
    ("name", "compute", "reduce", "scaled"),
    [("fp32", "float32", "float32", False), ("bf16", "bfloat16", "bfloat16", False), ("fp16", "float16", "float32", True)],
)
def test_rows(plan_of, name, compute, reduce, scaled):
    planned = plan_of(precision__name=name)
    found = planned.plan.precision
    assert (found.compute, found.reduce, found.loss_scale is not None) == (compute, reduce, scaled)
    assert found.gradient == found.master == found.optimizer == "float32"
    assert not planned.problems


def test_dtypes_by_hand_and_short_names(plan_of):
    found = plan_of(precision__name="bf16", precision__reduce="fp32", precision__gradient="bf16").plan.precision
    assert (found.compute, found.reduce, found.gradient) == ("bfloat16", "float32", "bfloat16")


def test_loss_scale_fields_reach_the_plan(plan_of):
    planned = plan_of(precision__name="fp16", precision__loss_scale__initial=1024.0, precision__loss_scale__hysteresis=2)
    assert planned.plan.precision.loss_scale == LossScale(initial=1024.0, hysteresis=2)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"precision__name": "fp8"}, "precision.name"),
        ({"precision__compute": "int4"}, "precision.compute"),
        ({"precision__name": "fp16", "precision__loss_scale__enabled": False}, "precision.loss_scale.enabled"),
        ({"precision__master": "fp16"}, "precision.master"),
        ({"precision__loss_scale__factor": 1.0}, "precision.loss_scale.factor"),
        ({"precision__loss_scale__interval": 0}, "precision.loss_scale.interval"),
        ({"precision__loss_scale__minimum": 0.0}, "precision.loss_scale.minimum"),
        ({"precision__loss_scale__initial": 0.5}, "precision.loss_scale.initial"),
        ({"precision__loss_scale__hysteresis": 0}, "precision.loss_scale.hysteresis"),
    ],
)
def test_mistakes(plan_of, overrides, key):
    planned = plan_of(**overrides)
    assert [p.key for p in planned.problems] == [key]
