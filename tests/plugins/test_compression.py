"""Wire formats."""

from __future__ import annotations

import pytest

from partita.plan.plan import Collectives, Wire


def test_native_by_default(plan_of):
    assert plan_of(launch__ranks=2).plan.collectives == Collectives()


def test_bf16_gradients(plan_of):
    planned = plan_of(launch__ranks=2, compression__gradient_reduce="bf16")
    assert planned.plan.collectives.gradient_reduce == Wire(format="bfloat16")
    assert not planned.problems


def test_what_travels_anyway_is_native(plan_of):
    planned = plan_of(
        launch__ranks=2,
        zero__stage=3,
        precision__name="bf16",
        compression__parameter_gather="bf16",
        compression__gradient_reduce="bf16",
    )
    assert planned.plan.collectives == Collectives()
    assert not planned.problems


def test_nothing_sent_is_told(plan_of):
    planned = plan_of(launch__ranks=1, compression__gradient_reduce="bfloat16", compression__parameter_gather="int8")
    assert {(x.key, x.got) for x in planned.manifest.differences()} == {
        ("compression.gradient_reduce", "native"),
        ("compression.parameter_gather", "native"),
    }
    assert not planned.problems


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"compression__gradient_reduce": "int8"}, "compression.gradient_reduce", "'int8' on the wire is not in this version"),
        ({"compression__gradient_reduce": "onebit"}, "compression.gradient_reduce", "not in this version"),
        ({"compression__gradient_reduce": "gzip"}, "compression.gradient_reduce", "'gzip' is no wire format"),
        ({"compression__gradient_reduce": "float16"}, "compression.gradient_reduce", "overflow above 65504"),
        ({"compression__parameter_gather": "int8", "zero__stage": 3}, "compression.parameter_gather", "not in this version"),
    ],
)
def test_refused(plan_of, overrides, key, words):
    (found,) = plan_of(launch__ranks=2, **overrides).problems
    assert found.key == key and words in found.reason
