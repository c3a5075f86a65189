"""Public failure reports, rebuilt small, for every placement. The names of the tests tell the failure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import cases
from engine_runs import HERE, NARROWER, PLACEMENTS, tiers_at
from pool import RankError, run_ranks

from partita.errors import PartitaError
from partita.plan.plan import Tier, Tiers

every_home = pytest.mark.parametrize("home", ["", "host", "file"])
every_placement = pytest.mark.parametrize("placement", sorted(PLACEMENTS))


def ranks(world: int, fn: Any, *args: Any) -> list[Any]:
    return run_ranks(world, fn, *args, timeout=60)


@every_placement
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
def test_every_token_weighs_the_same(placement: str, tokens: Any, gradient: float) -> None:
    for weight, norm in ranks(len(tokens), cases.token_weights, placement, tokens):
        assert weight == pytest.approx(1 - 0.1 * gradient, abs=1e-6)
        assert norm == pytest.approx(gradient, rel=1e-6)


@every_home
@every_placement
def test_reported_norm_is_the_one_before_clipping(placement: str, home: str) -> None:
    for norm, moved in ranks(2, cases.clip_report, placement, home):
        assert norm == pytest.approx(50.0, rel=1e-6)
        assert moved == pytest.approx([-0.6, -0.8], rel=1e-5)


@every_home
@every_placement
def test_each_group_has_its_rate_and_decay(placement: str, home: str) -> None:
    for got in ranks(2, cases.group_rates, placement, home):
        assert got == pytest.approx([-1e-2, -1e-4], rel=1e-6)
    for got in ranks(2, cases.group_decay, placement, home):
        assert got == pytest.approx([0.99, 1.0], rel=1e-6)


@every_home
@every_placement
def test_splitting_a_group_changes_nothing(placement: str, home: str) -> None:
    one, two = ranks(2, cases.split_groups, placement, home, False)[0], ranks(2, cases.split_groups, placement, home, True)[0]
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-7)


@every_placement
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_order_of_gradients_may_differ_between_ranks(placement: str, precision: str, bound: float) -> None:
    got = ranks(2, cases.rank_dependent_order, placement, precision)[0]
    model = cases.TwoPaths()
    loss = sum(model(torch.randn(6, 8, generator=torch.Generator().manual_seed(r)), bool(r)) for r in range(2)) / 2
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert float((got[name] - p.grad).norm() / p.grad.norm()) < bound, name


@every_placement
def test_parameter_first_used_in_the_last_micro_batch(placement: str) -> None:
    for first, moved, second, still in ranks(2, cases.late_parameter, placement):
        torch.testing.assert_close(first, torch.full((4, 4), 2 / 3), rtol=1e-2, atol=0)
        torch.testing.assert_close(moved, -0.1 * first, rtol=1e-3, atol=1e-6)
        assert not second.any()
        assert not still.any()


@every_placement
def test_masters_keep_what_bf16_would_lose(placement: str) -> None:
    for master, seen, dtype in ranks(2, cases.bf16_masters, placement):
        assert master == pytest.approx(0.9, abs=1e-5)
        assert seen == 0.8984375
        assert dtype == "torch.float32"


@every_placement
def test_bf16_gradients_accumulate_in_fp32(placement: str) -> None:
    for total in ranks(1, cases.bf16_accumulation, placement):
        assert total == 512.0


@every_home
@every_placement
def test_overflow_skips_on_all_ranks_and_halves_the_scale(placement: str, home: str) -> None:
    for got in ranks(2, cases.overflow, placement, home):
        assert got == [(True, 1024.0, 0.9, 1), (False, 512.0, 0.9, 1), (True, 512.0, 0.8, 2), (True, 1024.0, 0.7, 3)]


@every_placement
def test_tied_weights_from_meta_get_the_whole_gradient(placement: str) -> None:
    for gradient, same in ranks(2, cases.tied, placement):
        assert gradient == pytest.approx(2.0)
        assert same


@every_home
@every_placement
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_between_forward_and_backward(placement: str, mode: str, home: str) -> None:
    plain, disturbed = (
        ranks(2, cases.evaluation_between, placement, home, "none")[0],
        ranks(2, cases.evaluation_between, placement, home, mode)[0],
    )
    for name, value in plain.items():
        assert torch.equal(disturbed[name], value), name


@every_placement
@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_without_elements_or_dimensions(placement: str, world: int) -> None:
    for whole, shapes in ranks(world, cases.odd_shapes, placement):
        expected = {"eight": (8,), "none": (0,), "many": (2, 3, 4), "three": (3,), "one": ()}
        for i, (name, shape) in enumerate(expected.items()):
            assert whole[name].shape == shape
            torch.testing.assert_close(whole[name], torch.full(shape, (i + 1) * 0.8**3))
        for key, shape in shapes.items():
            assert shape == expected[key.split(".")[1]]


@every_placement
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2])
def test_states_take_the_bytes_that_the_layout_says(placement: str, precision: str, parts: int, tmp_path: Path) -> None:
    some = Tiers(gradients=Tier("host", 0.3), optimizer=Tier("file", 0.3), path=str(tmp_path))
    homes = [HERE, some, *(tiers_at(home, placement) for home in ("host", "file"))]
    for world, tiers in [(w, t) for w in (1, 4) for t in homes]:
        for planned, allocated in ranks(world, cases.memory, placement, precision, tiers, parts):
            assert allocated == planned


@pytest.mark.parametrize("placement", sorted(NARROWER))
def test_states_of_narrower_placements_take_the_bytes_that_the_layout_says(placement: str) -> None:
    for parts in (1, 2):
        for planned, allocated in ranks(4, cases.memory, placement, "bf16", HERE, parts, 2):
            assert allocated == planned


@every_placement
@pytest.mark.parametrize("native", [False, True])
def test_gradients_travel_in_the_format_of_the_plan(placement: str, native: bool) -> None:
    """1.001 becomes 1 on a bfloat16 wire. The sum 257 needs float32 (bfloat16 has 256 and 258); only a shared sum is rounded again."""
    expected = 256.0 if placement == "replicated" else 257.0
    assert ranks(2, cases.narrow_wire, placement, native) == [expected, expected]


@every_placement
def test_gradients_can_be_changed_before_the_update(placement: str) -> None:
    model = cases.TwoPaths()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = sum(model(torch.randn(6, 8, generator=torch.Generator().manual_seed(r)), False) for r in range(2)) / 2
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    grads["a.weight"].mul_(2)
    grads["b.weight"][1:] = 0
    expected = torch.stack([g.norm() for g in grads.values()]).norm()
    for norm, weights in ranks(2, cases.changed_gradient, placement):
        assert norm == pytest.approx(float(expected), rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(value, start[name] - grads[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_ranks_that_run_different_blocks_are_told_so(prefetch: int) -> None:
    """Weights of equal sizes would meet without an error of the backend."""
    with pytest.raises(RankError) as raised:
        run_ranks(2, cases.diverge, "parameters", prefetch, timeout=40)
    said = str(raised.value.__cause__)
    assert isinstance(raised.value.__cause__, PartitaError)
    assert "same blocks" in said
    assert "gather of blocks." in said
