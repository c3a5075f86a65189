"""Wire formats."""

from __future__ import annotations

import pytest

from partita.plan.plan import Collectives, Wire
from partita_compression.settings import Local, Settings, Traffic


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
    planned = plan_of(
        launch__ranks=1,
        compression__gradient_reduce="bfloat16",
        compression__parameter_gather="int8",
        compression__expert_dispatch="int8",
    )
    assert {(x.key, x.got) for x in planned.manifest.differences()} == {
        ("compression.gradient_reduce", "native"),
        ("compression.parameter_gather", "native"),
        ("compression.expert_dispatch", "native"),
    }
    assert not planned.problems


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"compression__gradient_reduce": "gzip"}, "compression.gradient_reduce", "'gzip' is no wire format"),
        ({"compression__gradient_reduce": "float16"}, "compression.gradient_reduce", "overflow above 65504"),
        ({"compression__parameter_gather": "onebit", "zero__stage": 3}, "compression.parameter_gather", "no wire format"),
        ({"compression__algorithm": "ring"}, "compression.algorithm", "'ring' is no algorithm"),
        ({"compression__rounding": "up"}, "compression.rounding", "is not one of"),
        ({"compression__error_average": 1.0}, "compression.error_average", "can't be had"),
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


def test_weights_that_every_rank_updates_are_not_gathered(plan_of):
    planned = plan_of(launch__ranks=2, zero__stage=0, compression__parameter_gather="int8")
    (line,) = planned.manifest.differences()
    assert (line.key, line.got) == ("compression.parameter_gather", "native") and "nothing is gathered" in line.reason


def test_exact_weights_stand_beside_rounded_ones(plan_of):
    """Where the gathered weights stay, a rank's shard is kept a second time."""
    plain, rounded = (plan_of(launch__ranks=2, zero__stage=2, compression__parameter_gather=f) for f in ("native", "int8"))
    more = rounded.draft.state_bytes(rounded.plan)["optimizer"] - plain.draft.state_bytes(plain.plan)["optimizer"]
    assert more == plain.draft.state_bytes(plain.plan)["gradients"]  # those of a shard, in float32 too
    cut = plan_of(launch__ranks=2, zero__stage=3, compression__parameter_gather="int8")
    assert cut.draft.state_bytes(cut.plan)["optimizer"] == plain.draft.state_bytes(plain.plan)["optimizer"]


def test_warmup_is_a_share_of_the_run(plan_of):
    planned = plan_of(launch__ranks=2, compression__gradient_reduce="onebit", compression__warmup=0.2, train__steps=50)
    assert planned.plan.collectives.provider == "compressed"
    assert planned.plan.extensions["compression"] == Settings(warmup=10, feedback=True, node_ranks=1)


def test_one_level_is_flat(plan_of):
    planned = plan_of(launch__ranks=2, compression__algorithm="hierarchical", compression__node_ranks=2)
    assert planned.plan.collectives.provider == "default"
    assert [line.key for line in planned.manifest.differences()] == ["compression.algorithm"]


def test_options_without_a_use_are_told(plan_of):
    useless = {"error_feedback": True, "warmup": 0.1, "error_average": 0.5, "error_reset": 9, "rounding": "stochastic"}
    planned = plan_of(launch__ranks=2, **{f"compression__{k}": v for k, v in useless.items()})
    assert {line.key for line in planned.manifest.differences()} == {f"compression.{k}" for k in useless}


def test_rules_that_send_few_bits_say_what_travels(plan_of):
    """The plan of the tests' own rules has none of ours: they are built from their config node."""
    from partita.config.compose import compose_config, registry_for
    from partita.plan.make import make_plan

    def problems(*overrides):
        planned = make_plan(compose_config(["parallel.data=2", *overrides])[0], registry_for(()))
        return planned.plan, {p.key: p.reason for p in planned.problems}

    plan, found = problems("+strategy=onebit_adam", "train.steps=50", "zero.stage=3")
    assert not found and plan.collectives.gradient_reduce.format == "onebit"
    assert plan.extensions["compression"].traffic == (Traffic(10, 0.9),) and plan.extensions["compression"].feedback
    plan, found = problems("optimizer=zero_one_adam", "compression=int8", "train.steps=50")
    assert not found and plan.collectives.gradient_reduce.format == "int8"
    assert plan.extensions["compression"].traffic == (Traffic(25, None, 16),)
    _, found = problems("optimizer=onebit_adam", "precision=fp16", "compression.error_feedback=false")
    assert {"optimizer.name", "compression.error_feedback"} <= set(found)
    _, found = problems("+strategy=onebit_lamb", "parallel=tensor")
    assert "needs whole tensors" in found["optimizer.name"]
    _, found = problems("optimizer=adamw", "+optimizer.options.freeze_step=3")
    assert found == {"optimizer.options.freeze_step": "the update rule 'adamw' has no such option."}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"compression__gradient_reduce": "powersgd", "zero__preset": "hsdp", "parallel__replicate": 2, "parallel__shard": 2}, "gradient_reduce"),
        ({"compression__rank": 0}, "rank"),
        ({"compression__pipeline_activations": "int8"}, "pipeline_activations"),
        ({"compression__expert_dispatch": "int4"}, "expert_dispatch"),
        ({"compression__density": 0.0}, "density"),
    ],
)  # fmt: skip
def test_what_thin_messages_cannot_do(plan_of, overrides, key):
    found = plan_of(launch__ranks=4 if "parallel__shard" in overrides else 2, **overrides).problems
    assert f"compression.{key}" in {p.key for p in found}


def test_groups_that_train_for_themselves(plan_of):
    two = {"launch__ranks": 4, "parallel__replicate": 2, "parallel__shard": 2, "zero__preset": "hsdp", "local__every": 10}
    planned = plan_of(**two, local__method="diloco", train__steps=100)
    assert not planned.problems and planned.plan.extensions["compression"].local == Local(10, 0.7, 0.9)
    alone = plan_of(launch__ranks=2, local__every=10)
    assert [line.key for line in alone.manifest.differences()] == ["local.every"] and not alone.problems
    found = {
        p.key for p in plan_of(**{**two, "zero__preset": None, "zero__stage": 3}, train__steps=101, local__format="zip").problems
    }
    assert found == {"local.every", "local.format", "train.steps"}
