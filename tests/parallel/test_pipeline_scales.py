"""Scales of gradients, loss and clip factor under a pipeline, in closed form (public reports of other frameworks)."""

from __future__ import annotations

import pytest
import scalars
from pool import run_ranks


def joined(results, what):
    """Values by parameter over all ranks."""
    return {name: value for result in results for name, value in result[what].items()}


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_accumulation_scales_every_stage_alike(world, count):
    """deepspeedai/DeepSpeed#8152: stages before the last got the factor once more each."""
    results = run_ranks(world, scalars.gradients, "1f1b", [[1]] * count)
    assert set(joined(results, 0).values()) == {1.0} and len(joined(results, 0)) == world


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"])
def test_rounds_of_micro_batches_weigh_the_same(schedule):
    """pytorch/torchtitan#1733: earlier rounds faded away. The mean of 1 to 6 is 3.5."""
    results = run_ranks(2, scalars.gradients, schedule, [[v] for v in range(1, 7)])
    assert set(joined(results, 0).values()) == {3.5}


def test_the_loss_is_divided_by_its_tokens_before_backward():
    """pytorch/torchtitan#2972: the reported loss was divided and the gradient was not; here, with padding of uneven length."""
    results = run_ranks(2, scalars.gradients, "1f1b", [[4, 0, 0], [1, 2, 3], [0, 0, 0], [5, 6, 0]])
    assert set(joined(results, 0).values()) == {21 / 6}


def test_the_norm_is_that_of_all_stages():
    """pytorch/torchtitan#596: the clip factor came from the own stage. Gradients 3 and 4, norm 5, clipped 0.6 and 0.8."""
    results = run_ranks(2, scalars.gradients, "1f1b", [[1], [1]], {"blocks.0.weight": 4.0, "blocks.1.weight": 3.0}, 1.0)
    assert joined(results, 0) == {"blocks.0.weight": 3.0, "blocks.1.weight": 4.0}
    assert all(norm == 5.0 for _, norm, _ in results)
    assert joined(results, 2) == pytest.approx({"blocks.0.weight": 3.4, "blocks.1.weight": 2.2}, abs=1e-5)
