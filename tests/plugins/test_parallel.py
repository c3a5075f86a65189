"""Degrees and the batch equation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.plan.plan import Layout
from partita_parallel.batch import largest_divisor, solve_batch


def problem(planned, key):
    (found,) = [p for p in planned.problems if p.key == key]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_all_ranks_go_to_data_and_are_one_shard_group(plan_of, ranks):
    layout = plan_of(launch__ranks=ranks, train__global_batch=24).plan.layout
    assert (layout.data, layout.replicate, layout.shard, layout.world) == (ranks, 1, ranks, ranks)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"replicate": 2}, (2, 2)),
        ({"shard": 1}, (4, 1)),
        ({"data": 4, "shard": 2}, (2, 2)),
        ({"replicate": 2, "shard": 2}, (2, 2)),
    ],
)
def test_what_is_auto_follows(plan_of, asked, expected):
    layout = plan_of(launch__ranks=4, **{f"parallel__{k}": v for k, v in asked.items()}).plan.layout
    assert (layout.replicate, layout.shard) == expected


def test_flexible_ranks_take_what_the_layout_asks(plan_of):
    planned = plan_of(parallel__data=4)
    if not planned.cluster.accelerator:
        assert planned.plan.layout.world == 4 and not planned.problems
        assert plan_of(zero__shard_size=2).plan.layout == Layout(replicate=2, shard=2)
        assert plan_of(train__global_batch=1).plan.layout.world == 1


def test_degrees_that_contradict_the_ranks_show_the_equation(plan_of):
    found = problem(plan_of(launch__ranks=4, parallel__data=3, train__global_batch=12), "parallel.data")
    assert "1 x 1 x 3 x 1 x 1 = 3, but there are 4 ranks (launch.ranks)" in found.reason
    assert "launch.ranks=3" in found.remedy


def test_data_must_be_replicate_times_shard(plan_of):
    found = problem(plan_of(launch__ranks=4, parallel__data=4, parallel__replicate=3, parallel__shard=2), "parallel.data")
    assert "4 != 3 x 2" in found.reason


def test_ranks_not_divisible_by_the_other_axes(plan_of):
    planned = plan_of(launch__ranks=6, parallel__tensor=4)
    assert "6 ranks can't be divided by pipeline x context x tensor = 4" in problem(planned, "parallel.data").reason


@pytest.mark.parametrize("value", [0, -1, "four"])
def test_counts(plan_of, value):
    assert "is no positive whole number" in problem(plan_of(parallel__shard=value), "parallel.shard").reason


# ------------------------------------------------------------------ the batch (public case: deepspeedai/DeepSpeed#6914)


def test_8_by_micro_2_on_4_ranks_runs(plan_of):
    planned = plan_of(launch__ranks=4, train__global_batch=8, train__micro_batch=2, parallel__microbatches=1)
    assert not planned.problems and planned.plan.schedule.micro_batches == 1


def test_the_same_with_tensor_2_shows_data_not_world(plan_of):
    planned = plan_of(launch__ranks=4, parallel__tensor=2, train__global_batch=8, train__micro_batch=2, parallel__microbatches=1)
    found = problem(planned, "train.micro_batch")
    assert "8 != 2 x 2 x 1 = 4 (data is 2 of 4 ranks: tensor takes 2)" in found.reason
    for legal in ("train.global_batch=4", "train.micro_batch=4", "parallel.microbatches=2"):
        assert legal in found.remedy


def test_18_by_micro_3_on_4_ranks_is_refused_never_rounded(plan_of):
    found = problem(
        plan_of(launch__ranks=4, train__global_batch=18, train__micro_batch=3, parallel__microbatches=1), "train.global_batch"
    )
    assert "18 sequences can't be shared by data = 4" in found.reason
    assert "train.global_batch=16 or 20" in found.remedy and "1, 2, 3" in found.remedy


@pytest.mark.parametrize(
    ("micro", "count", "expected"), [("auto", "auto", (8, 2)), (4, "auto", (4, 4)), ("auto", 4, (4, 4)), (16, 1, (16, 1))]
)
def test_two_fields_give_the_third(plan_of, micro, count, expected):
    schedule = plan_of(
        launch__ranks=2, train__global_batch=32, train__micro_batch=micro, parallel__microbatches=count
    ).plan.schedule
    assert (schedule.micro_batch, schedule.micro_batches) == expected


@pytest.mark.parametrize("overrides", [{"train__global_batch": 0}, {"train__micro_batch": 5}, {"train__micro_batch": "half"}])
def test_batches_that_cant_be(plan_of, overrides):
    planned = plan_of(launch__ranks=2, **overrides)
    assert len(planned.problems) == 1 and planned.problems[0].remedy


@given(st.integers(1, 64), st.integers(1, 8), st.one_of(st.none(), st.integers(1, 9)), st.one_of(st.none(), st.integers(1, 9)))
def test_the_equation_holds_or_a_problem_says_so(global_batch, data, micro, count):
    batch, problems = solve_batch(global_batch, Layout(shard=data), micro, count)
    holds = data * batch.micro_batch * batch.micro_batches == global_batch
    assert holds == (not problems)
    solvable = (
        global_batch % data == 0
        and (global_batch // data) % math.lcm(1, micro or 1) == 0
        and (global_batch // data) % (count or 1) == 0
    )
    if micro is None or count is None:
        assert holds == solvable


@given(st.integers(1, 200), st.integers(1, 20))
def test_largest_divisor(number, limit):
    found = largest_divisor(number, limit)
    assert number % found == 0 and found <= limit
    assert all(number % d for d in range(found + 1, min(number, limit) + 1))


# ------------------------------------------------------------------ stages


def test_stage_cuts_are_even(plan_of):
    planned = plan_of(model__layers=8, parallel__pipeline=4, parallel__data=1, train__micro_batch=2)
    assert planned.plan.layout.stage_cuts == (3, 5, 7)
    assert planned.plan.schedule.name == "1f1b"


def test_more_stages_than_blocks(plan_of):
    planned = plan_of(model__layers=2, parallel__pipeline=4, parallel__data=1, train__micro_batch=2)
    assert any("4 stages can't be made of 2 blocks" in p.reason for p in planned.problems)


def test_schedule_without_stages_is_told(plan_of):
    (line,) = plan_of(launch__ranks=2, parallel__schedule="1f1b").manifest.differences()
    assert (line.key, line.got) == ("parallel.schedule", "none")
    assert "did you mean '1f1b'" in problem(plan_of(parallel__schedule="1f1"), "parallel.schedule").remedy.lower()
