"""Wire formats."""

from __future__ import annotations

import pytest

from partita.plan.plan import Collectives, Wire
from partita_compression.settings import Settings


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
        ({"compression__gradient_reduce": "gzip"}, "compression.gradient_reduce", "'gzip' is no wire format"),
        ({"compression__gradient_reduce": "float16"}, "compression.gradient_reduce", "overflow above 65504"),
        ({"compression__parameter_gather": "onebit", "zero__stage": 3}, "compression.parameter_gather", "no wire format"),
        ({"compression__algorithm": "ring"}, "compression.algorithm", "'ring' is no algorithm"),
        ({"compression__levels": "fast"}, "compression.levels", "is not one of"),
        ({"compression__warmup": 1.5}, "compression.warmup", "no share"),
        ({"compression__node_ranks": 0}, "compression.node_ranks", "no 0 ranks"),
        (
            {"compression__gradient_reduce": "onebit", "compression__error_feedback": False},
            "compression.error_feedback",
            "does not converge",
        ),
        ({"compression__gradient_reduce": "onebit", "precision__name": "fp16"}, "compression.error_feedback", "loss scale"),
    ],
)
def test_refused(plan_of, overrides, key, words):
    (found,) = plan_of(launch__ranks=2, **overrides).problems
    assert found.key == key and words in found.reason


def test_stored_weights_are_not_rounded(plan_of):
    planned = plan_of(launch__ranks=2, zero__stage=2, compression__parameter_gather="int8")
    (line,) = planned.manifest.differences()
    assert (line.key, line.got) == ("compression.parameter_gather", "native") and "zero.stage=3" in line.reason


def test_warmup_is_a_share_of_the_run(plan_of):
    planned = plan_of(launch__ranks=2, compression__gradient_reduce="onebit", compression__warmup=0.2, train__steps=50)
    assert planned.plan.collectives.provider == "compressed"
    assert planned.plan.extensions["compression"] == Settings(warmup=10, feedback=True, node_ranks=1)


def test_one_level_is_flat(plan_of):
    planned = plan_of(launch__ranks=2, compression__algorithm="hierarchical", compression__node_ranks=2)
    assert planned.plan.collectives.provider == "default"
    assert [line.key for line in planned.manifest.differences()] == ["compression.algorithm"]


def test_options_without_a_use_are_told(plan_of):
    planned = plan_of(launch__ranks=2, compression__error_feedback=True, compression__warmup=0.1)
    assert {line.key for line in planned.manifest.differences()} == {"compression.error_feedback", "compression.warmup"}
