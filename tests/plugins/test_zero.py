"""Presets as rows of one table, cells by hand, contradictions."""

from __future__ import annotations

import pytest

from partita_zero.presets import PRESETS, STAGES


def keys(planned):
    return [p.key for p in planned.problems]


@pytest.mark.parametrize("stage", range(4))
def test_stage_is_a_row(plan_of, stage):
    planned = plan_of(launch__ranks=4, zero__stage=stage)
    assert planned.plan.placement == PRESETS[STAGES[stage]]
    assert not planned.problems


@pytest.mark.parametrize("row", PRESETS.values(), ids=PRESETS)
def test_every_row_has_a_whole_shard_to_update(row):
    assert set(row.parameters) | set(row.gradients) <= set(row.optimizer)


def test_hsdp_makes_groups(plan_of):
    planned = plan_of(launch__ranks=4, zero__preset="hsdp", zero__shard_size=2)
    assert (planned.plan.layout.replicate, planned.plan.layout.shard) == (2, 2)
    assert planned.plan.placement.parameters == ("shard",)
    assert not planned.problems


def test_hsdp_without_groups_says_what_it_comes_to(plan_of):
    (line,) = plan_of(launch__ranks=4, zero__preset="hsdp").manifest.differences()
    assert line.key == "zero.preset" and "zero.shard_size" in line.reason


def test_one_rank_says_that_nothing_is_cut(plan_of):
    (line,) = [x for x in plan_of(launch__ranks=1, zero__stage=3).manifest.differences() if x.key == "zero.stage"]
    assert line.got == "all states whole"


def test_cells_by_hand(plan_of):
    planned = plan_of(launch__ranks=4, zero__stage=3, zero__parameters=[], zero__optimizer=["shard", "replicate"])
    assert planned.plan.placement.parameters == ()
    assert planned.plan.placement.optimizer == ("replicate", "shard"), "in mesh order"
    assert not planned.problems


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"zero__stage": 4}, "zero.stage", "there is no stage 4"),
        ({"zero__stage": -1}, "zero.stage", "there is no stage -1"),
        ({"zero__preset": "hsdpp"}, "zero.preset", "'hsdpp' is no preset"),
        ({"zero__preset": "hsdp", "zero__stage": 2}, "zero.preset", "zero.preset=hsdp and zero.stage=2 are two answers"),
        ({"zero__parameters": ["shrad"]}, "zero.parameters", "'shrad' is no axis"),
        ({"zero__parameters": ["shard"]}, "zero.parameters", "the optimizer over [] only"),
        (
            {"zero__stage": 3, "zero__optimizer": ["tensor"]},
            "zero.optimizer",
            "cutting optimizer over tensor is not in this version",
        ),
        ({"zero__prefetch": -1}, "zero.prefetch", "-1 units"),
        ({"zero__stage": 3, "zero__max_gathered": 10}, "zero.max_gathered", "10 bytes don't hold"),
        ({"zero__shard_size": 3}, "zero.shard_size", "4 data ranks can't be cut into groups of 3"),
        ({"zero__shard_size": 0}, "zero.shard_size", "0 ranks make no group"),
        ({"zero__shard_size": "rack"}, "zero.shard_size", "'rack' is neither"),
        ({"zero__shard_size": 2, "parallel__shard": 4}, "zero.shard_size", "two answers"),
    ],
)
def test_mistakes(plan_of, overrides, key, words):
    planned = plan_of(launch__ranks=4, **overrides)
    assert any(p.key == key and words in p.reason for p in planned.problems), planned.problems
    assert all(p.remedy for p in planned.problems)


def test_nearest_preset(plan_of):
    (problem,) = plan_of(zero__preset="zero33").problems
    assert "'zero3'" in problem.remedy


@pytest.mark.parametrize("preset", ["hpz", "hfsdp"])
def test_narrower_cuts_hold_more_of_the_weights(plan_of, preset):
    narrow = plan_of(launch__ranks=4, zero__preset=preset, zero__shard_size=2)
    wide = plan_of(launch__ranks=4, zero__stage=3, zero__shard_size=2)
    assert not narrow.problems
    states = [p.draft.state_bytes(p.plan) for p in (narrow, wide)]
    assert states[0]["parameters"] == 2 * states[1]["parameters"]
    assert states[0]["optimizer"] == states[1]["optimizer"]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"zero__parameters": ["shard"], "zero__gradients": ["replicate"]}, "zero.gradients", "neither cut lies inside"),
        ({"zero__preset": "hpz", "zero__stage": 0, "offload__parameters": "host"}, "offload.parameters", "fewer ranks than"),
    ],
)
def test_narrower_cuts_that_cannot_be(plan_of, overrides, key, words):
    overrides = {"zero__stage": 3, "zero__shard_size": 2, **overrides}
    planned = plan_of(launch__ranks=4, **overrides)
    assert any(p.key == key and words in p.reason for p in planned.problems), planned.problems


def test_prefetch_reaches_the_plan(plan_of):
    assert plan_of(launch__ranks=2, zero__stage=3, zero__prefetch=3).plan.extensions["prefetch"] == 3


def test_prefetch_without_gathers_is_told(plan_of):
    assert [x.key for x in plan_of(launch__ranks=2, zero__prefetch=3).manifest.differences()] == ["zero.prefetch"]


def test_max_gathered_shrinks_prefetch(plan_of):
    draft = plan_of(launch__ranks=2, zero__stage=3).draft
    root, block = draft.block_bytes("float32")
    planned = plan_of(launch__ranks=2, zero__stage=3, zero__prefetch=3, zero__max_gathered=root + 2 * block)
    assert planned.plan.extensions["prefetch"] == 1
    assert [(x.key, x.got) for x in planned.manifest.differences()] == [("zero.prefetch", 1)]
    assert not planned.problems
