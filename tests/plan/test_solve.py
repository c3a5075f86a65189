"""The planner against brute force over the same plans, with keys pinned, and where nothing fits."""

from __future__ import annotations

import itertools
import os

import pytest

from partita.plan.check import USABLE
from partita.plan.estimate import memory_total, speed
from partita.plan.solve.options import with_settings
from partita.plan.solve.search import SIMPLE, features
from partita.state.capabilities import CAPABILITIES

EVERYTHING = {
    "axes": frozenset({"pipeline", "replicate", "shard", "context", "tensor", "expert"}),
    "tiers": frozenset({"accelerator", "host", "file"}),
    "schedules": frozenset({"none", "1f1b", "zbv"}),
    "placements": frozenset({"narrower"}),
}
AUTO = {
    "parallel__tensor": "auto",
    "parallel__pipeline": "auto",
    "parallel__context": "auto",
    "zero__stage": "auto",
    "recompute__policy": "auto",
}
NODE = {"cluster__nodes": 1, "cluster__devices_per_node": 8, "cluster__device": "a100", "precision__name": "bf16"}
# 3.4 billion parameters: they fit a device only when something is cut
LARGE = {"model__width": 4096, "model__layers": 16, "model__heads": 32, "data__sequence": 2048, "train__global_batch": 32}


@pytest.fixture
def everything(monkeypatch):
    """As if the engine could carry out all that the planner knows of."""
    for name, value in EVERYTHING.items():
        monkeypatch.setitem(CAPABILITIES, name, value)


@pytest.fixture
def able(everything, plan_of):
    return plan_of


def test_every_auto_gets_a_value_and_the_manifest_says_why(able):
    planned = able(**AUTO, **NODE)
    planned.raise_problems()
    lines = {x.key: x for x in planned.manifest}
    for key in ("parallel.tensor", "parallel.pipeline", "zero.stage", "recompute.policy", "train.micro_batch"):
        assert lines[key].asked == "auto" and lines[key].got not in ("auto", None) and "planner" in lines[key].reason
    assert planned.choice.rows[0].verdict == "taken"
    assert planned.config.parallel.tensor == planned.plan.layout.tensor


@pytest.mark.parametrize(
    "pins",
    [
        {"parallel__tensor": 4},
        {"zero__stage": 3},
        {"parallel__pipeline": 2, "recompute__policy": "full"},
        {"train__micro_batch": 2},
        {"parallel__shard": 2},
        {"parallel__microbatches": 4},
    ],
)
def test_keys_that_are_written_out_stay(able, pins):
    planned = able(**{**AUTO, **NODE, **pins})
    planned.raise_problems()
    layout, schedule = planned.plan.layout, planned.plan.schedule
    seen = {
        "parallel__tensor": layout.tensor,
        "parallel__pipeline": layout.pipeline,
        "parallel__shard": layout.shard,
        "parallel__microbatches": schedule.micro_batches,
        "train__micro_batch": schedule.micro_batch,
        "zero__stage": planned.config.zero.stage,
        "recompute__policy": planned.config.recompute.policy,
    }
    assert {key: seen[key] for key in pins} == pins


def test_what_lies_between_matrices_is_cut_where_that_helps_and_can_be(able):
    """Less is kept and less crosses memory; a model that doesn't say that its tokens can be cut keeps them whole."""
    asked = {**NODE, "parallel__tensor": 4, "parallel__sequence_parallel": "auto"}
    for model, expected in (("llama", True), ("gpt", False)):  # `gpt` is the toy here
        planned = able(**asked, model__name=model)
        planned.raise_problems()
        assert planned.plan.layout.sequence_parallel is expected
        line = next(x for x in planned.manifest if x.key == "parallel.sequence_parallel")
        assert line.asked == "auto" and line.got is expected


def test_stages_of_a_rank_are_chosen_where_the_schedule_leaves_them_open(able, monkeypatch):
    monkeypatch.setitem(CAPABILITIES, "schedules", frozenset({"none", "1f1b", "interleaved"}))
    asked = {**NODE, "model__layers": 8, "parallel__pipeline": 2, "parallel__tensor": "auto", "parallel__schedule": "interleaved"}
    planned = able(**asked, train__global_batch=16, train__micro_batch=1)
    planned.raise_problems()
    assert planned.config.parallel.stages_per_rank in (2, 4)
    assert len(planned.plan.layout.stage_ranks) == 2 * planned.config.parallel.stages_per_rank


LONG = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="takes a minute: PARTITA_LONG_TESTS=1 runs it")


@pytest.mark.parametrize("sizes", [{}, pytest.param(LARGE, marks=LONG)], ids=["small", "large"])
def test_brute_force_finds_nothing_better(able, registry, make_config, sizes):
    """An independent loop over all settings, each planned in full as if a user had written it out."""
    small = {"model__width": 64, "model__layers": 4, "model__heads": 4, "data__sequence": 32}
    free = {**AUTO, **NODE, **small, **sizes, "parallel__context": 1}
    chosen = able(**free)
    chosen.raise_problems()
    best = None
    degrees = [(p, t) for p, t in itertools.product((1, 2, 4, 8), repeat=2) if p * t <= 8]
    for (pipeline, tensor), stage, recompute, micro in itertools.product(degrees, (0, 1, 3), ("none", "full"), (1, 4)):
        written = {"parallel__pipeline": pipeline, "parallel__tensor": tensor, "zero__stage": stage}
        one = able(**{**free, **written, "recompute__policy": recompute, "train__micro_batch": micro})
        if one.problems or one.choice is not None:
            continue
        seconds = speed(one.draft, one.plan, one.costs).seconds * (1 + SIMPLE * features(one.plan))
        assert memory_total(one.costs) <= USABLE * one.cluster.memory
        if best is None or seconds < best[0]:
            best = (seconds, one.plan)
    found = speed(chosen.draft, chosen.plan, chosen.costs).seconds * (1 + SIMPLE * features(chosen.plan))
    assert found <= best[0] * 1.0001, (chosen.choice.rows[0].plan, best)


def test_where_nothing_fits_the_smallest_is_shown_and_refused(able):
    planned = able(**{**AUTO, **NODE, **LARGE, "model__width": 32768, "model__heads": 32})
    assert planned.problems and "GiB" in planned.problems[0].reason
    assert "nothing fits" in {x.key: x.reason for x in planned.manifest}["zero.stage"]


def test_states_leave_only_where_nothing_fits_without(able):
    free = {**AUTO, **NODE, **LARGE, "parallel__tensor": 1, "offload__optimizer": "auto", "offload__gradients": "auto"}
    fits = able(**{**free, "cluster__devices_per_node": 8})
    assert fits.plan.tiers.optimizer.place == "accelerator"
    alone = able(**{**free, "cluster__devices_per_node": 1, "cluster__memory": 24e9, "train__micro_batch": 1})
    assert alone.plan.tiers.optimizer.place == "host", alone.problems


def test_what_this_version_cant_carry_out_is_not_chosen(plan_of, monkeypatch):
    monkeypatch.setitem(CAPABILITIES, "axes", frozenset({"replicate", "shard"}))
    monkeypatch.setitem(CAPABILITIES, "schedules", frozenset({"none"}))
    planned = plan_of(**AUTO, **NODE)
    planned.raise_problems()
    assert planned.plan.layout.tensor == planned.plan.layout.pipeline == 1


def test_a_device_of_unknown_speed_is_refused(able):
    planned = able(
        **{**AUTO, "cluster__nodes": 1, "cluster__devices_per_node": 4, "cluster__device": "new", "cluster__memory": 8e9}
    )
    (problem,) = [p for p in planned.problems if p.key == "cluster.flops"]
    assert "cluster.flops" in problem.remedy


def test_settings_copy_only_their_nodes(make_config):
    config = make_config()
    made = with_settings(config, {"zero.stage": 3, "train.micro_batch": 2})
    assert (made.zero.stage, made.train.micro_batch) == (3, 2)
    assert config.zero.stage == 0 and made.model is config.model
