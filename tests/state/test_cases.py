"""Public failure reports, rebuilt small, for every placement. The names of the tests tell the failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import cases
import partial_cases
from engine_runs import HERE, NARROWER, PLACEMENTS, tiers_at
from pool import RankError, run_ranks

from partita.errors import PartitaError
from partita.plan.plan import Tier, Tiers

HOMES = ("", "host", "file")
EVERY = sorted(PLACEMENTS)
LONG = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="many ranks: PARTITA_LONG_TESTS=1 runs it")


def ranks(world: int, fn: Any, *args: Any) -> list[Any]:
    return run_ranks(world, fn, *args, timeout=60)


def sweep(world: int, fn: Any, *choices: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(arguments, result of a rank) of `fn` for all combinations of its arguments, in one start of ranks."""
    calls = list(product(*choices))
    found = run_ranks(world, cases.sweep, fn, calls, timeout=100)
    for i, arguments in enumerate(calls):
        for rank in range(world):
            yield arguments, found[rank][i]


@pytest.mark.parametrize(
    ("tokens", "gradient"),
    [
        ([[(1, 1.0), (3, 5.0)]], 4.0),
        ([[(1, 1.0)], [(3, 5.0)]], 4.0),
        ([[(5, 1.0)], [(1, 7.0)]], 2.0),
        ([[(5, 1.0)], [(0, 7.0)]], 1.0),
        ([[(1, float(c)) for c in range(1, 7)]], 3.5),
    ],
)
def test_every_token_weighs_the_same(tokens: Any, gradient: float) -> None:
    for case, (weight, norm) in sweep(len(tokens), cases.token_weights, EVERY, [tokens]):
        assert weight == pytest.approx(1 - 0.1 * gradient, abs=1e-6), case
        assert norm == pytest.approx(gradient, rel=1e-6), case


def test_reported_norm_is_the_one_before_clipping() -> None:
    for case, (norm, moved) in sweep(2, cases.clip_report, EVERY, HOMES):
        assert norm == pytest.approx(50.0, rel=1e-6), case
        assert moved == pytest.approx([-0.6, -0.8], rel=1e-5), case


def test_each_group_has_its_rate_and_decay() -> None:
    for case, got in sweep(2, cases.group_rates, EVERY, HOMES):
        assert got == pytest.approx([-1e-2, -1e-4], rel=1e-6), case
    for case, got in sweep(2, cases.group_decay, EVERY, HOMES):
        assert got == pytest.approx([0.99, 1.0], rel=1e-6), case


def test_splitting_a_group_changes_nothing() -> None:
    found = dict(sweep(2, cases.split_groups, EVERY, HOMES, [False, True]))
    for (placement, home, split), one in found.items():
        for name, value in one.items() if not split else ():
            torch.testing.assert_close(found[placement, home, True][name], value, rtol=0, atol=1e-7)


def test_order_of_gradients_may_differ_between_ranks() -> None:
    model = cases.TwoPaths()
    loss = sum(model(torch.randn(6, 8, generator=torch.Generator().manual_seed(r)), bool(r)) for r in range(2)) / 2
    loss.backward()
    for case, got in sweep(2, cases.rank_dependent_order, EVERY, ["fp32", "bf16"]):
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert float((got[name] - p.grad).norm() / p.grad.norm()) < (1e-2 if "bf16" in case else 1e-6), (case, name)


def test_parameter_first_used_in_the_last_micro_batch() -> None:
    for case, (first, moved, second, still) in sweep(2, cases.late_parameter, EVERY):
        torch.testing.assert_close(first, torch.full((4, 4), 2 / 3), rtol=1e-2, atol=0)
        torch.testing.assert_close(moved, -0.1 * first, rtol=1e-3, atol=1e-6)
        assert not second.any(), case
        assert not still.any(), case


def test_masters_keep_what_bf16_would_lose() -> None:
    for case, (master, seen, dtype) in sweep(2, cases.bf16_masters, EVERY):
        assert master == pytest.approx(0.9, abs=1e-5), case
        assert seen == 0.8984375, case
        assert dtype == "torch.float32", case


def test_bf16_gradients_accumulate_in_fp32() -> None:
    for case, total in sweep(1, cases.bf16_accumulation, EVERY):
        assert total == 512.0, case


def test_overflow_skips_on_all_ranks_and_halves_the_scale() -> None:
    for case, got in sweep(2, cases.overflow, EVERY, HOMES):
        assert got == [(True, 1024.0, 0.9, 1), (False, 512.0, 0.9, 1), (True, 512.0, 0.8, 2), (True, 1024.0, 0.7, 3)], case


def test_tied_weights_from_meta_get_the_whole_gradient() -> None:
    for case, (gradient, same) in sweep(2, cases.tied, EVERY):
        assert gradient == pytest.approx(2.0), case
        assert same, case


def test_evaluation_between_forward_and_backward() -> None:
    found = dict(sweep(2, cases.evaluation_between, EVERY, HOMES, ["none", "no_grad", "inference_mode"]))
    for (placement, home, mode), disturbed in found.items():
        for name, value in found[placement, home, "none"].items():
            assert torch.equal(disturbed[name], value), (placement, home, mode, name)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_without_elements_or_dimensions(world: int) -> None:
    expected = {"eight": (8,), "none": (0,), "many": (2, 3, 4), "three": (3,), "one": ()}
    for _, (whole, shapes) in sweep(world, cases.odd_shapes, EVERY):
        for i, (name, shape) in enumerate(expected.items()):
            assert whole[name].shape == shape
            torch.testing.assert_close(whole[name], torch.full(shape, (i + 1) * 0.8**3))
        for key, shape in shapes.items():
            assert shape == expected[key.split(".")[1]]


@pytest.mark.parametrize("placement", EVERY)
def test_states_take_the_bytes_that_the_layout_says(placement: str, tmp_path: Path) -> None:
    some = Tiers(gradients=Tier("host", 0.3), optimizer=Tier("file", 0.3), path=str(tmp_path))
    homes = [HERE, some, *(tiers_at(home, placement) for home in ("host", "file"))]
    for world in (1, 4):
        for case, (planned, allocated) in sweep(world, cases.memory, [placement], ["fp32", "bf16"], homes, [1, 2]):
            assert allocated == planned, (world, case)


def test_states_of_narrower_placements_take_the_bytes_that_the_layout_says() -> None:
    for case, (planned, allocated) in sweep(4, cases.memory, sorted(NARROWER), ["bf16"], [HERE], [1, 2], [2]):
        assert allocated == planned, case


@LONG
def test_eight_ranks_hold_an_eighth_each() -> None:
    """Of weights, gradients and optimizer states, but for one tail of padding for each bucket."""
    (whole,) = {
        str(got[1]["accelerator"]): got[1]["accelerator"]
        for _, got in sweep(1, cases.memory, ["parameters"], ["bf16"], [HERE], [1])
    }.values()
    for _, (planned, allocated) in sweep(8, cases.memory, ["parameters"], ["bf16"], [HERE], [1]):
        assert allocated == planned
        for category, size in allocated["accelerator"].items():
            padding = 64 * 12 * (4 + 4)  # elements, bytes, buckets
            assert whole[category] / 8 <= size <= whole[category] / 8 + padding, category


def test_gradients_travel_in_the_format_of_the_plan() -> None:
    """1.001 becomes 1 on a bfloat16 wire. The sum 257 needs float32 (bfloat16 has 256 and 258); only a shared sum is rounded again."""
    for case, got in sweep(2, cases.narrow_wire, EVERY, [False, True]):
        assert got == (256.0 if case[0] == "replicated" else 257.0), case


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_can_be_changed_before_the_update(world: int) -> None:
    model = cases.TwoPaths()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = sum(model(torch.randn(6, 8, generator=torch.Generator().manual_seed(r)), False) for r in range(world)) / world
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    grads["a.weight"].mul_(2)
    grads["b.weight"][1:] = 0
    expected = torch.stack([g.norm() for g in grads.values()]).norm()
    for case, (norm, weights) in sweep(world, cases.changed_gradient, EVERY):
        assert norm == pytest.approx(float(expected), rel=1e-6), case
        for name, value in weights.items():
            torch.testing.assert_close(value, start[name] - grads[name], rtol=1e-6, atol=1e-7)


def test_adapters_on_frozen_blocks() -> None:
    """Only small layers in each block are trained; frozen weights are cut, and recomputed blocks find them whole (their sizes are compared
    by torch's checkpoint)."""
    losses, weights = partial_cases.adapters_by_hand(2)
    for case, (found, own, bytes_) in sweep(2, partial_cases.adapters, [*EVERY], HOMES, [False, True]):
        assert found == pytest.approx(losses, rel=1e-5), case
        for name, value in weights.items():
            torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}")
        frozen, trained = partial_cases.Adapted.sizes()
        share = 2 if case[0] == "parameters" else 1
        assert bytes_["parameters"] >= 4 * (frozen + trained) / share
        padding = 64 * 8 * 4  # of the buckets that are trained
        assert bytes_["optimizer"] <= 8 * (trained if case[0] == "replicated" else trained / 2) + padding, case


def test_a_model_larger_than_a_share_is_whole_nowhere() -> None:
    """Drawn and trained on 4 ranks from the meta device: no rank ever has memory for all weights at once."""
    for initial, training, whole in ranks(4, partial_cases.largest_at_once):
        # half the weights' bytes are shards of weights and gradients; then there are the blocks that are whole, and one block's gradients
        assert initial < 0.7 * whole, (initial, whole)
        assert training < whole, (training, whole)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_ranks_that_run_different_blocks_are_told_so(prefetch: int) -> None:
    """Weights of equal sizes would meet without an error of the backend."""
    with pytest.raises(RankError) as raised:
        run_ranks(2, cases.diverge, "parameters", prefetch, timeout=40)
    said = str(raised.value.__cause__)
    assert isinstance(raised.value.__cause__, PartitaError)
    assert "same blocks" in said
    assert "gather of blocks." in said


def test_ranks_that_call_a_block_more_often_are_told_so() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(2, cases.calls_more_often, "parameters", timeout=40)
    assert isinstance(raised.value.__cause__, PartitaError)
    assert "same blocks" in str(raised.value.__cause__)
