"""Scales of gradients, loss and clip factor under a pipeline, in closed form (public reports of other frameworks)."""

from __future__ import annotations

import pytest
import scalars
from packed import packed
from pool import run_ranks

SCHEDULES = ["gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"]


def gradients(world, *calls):
    """For each call: (gradients by parameter, norms by rank, weights after the update by parameter) of all ranks."""
    ranks = run_ranks(world, packed, scalars.gradients, calls)
    found = []
    for results in zip(*ranks, strict=True):
        named = [{name: value for result in results for name, value in result[what].items()} for what in (0, 2)]
        found.append((named[0], [result[1] for result in results], named[1]))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_accumulation_scales_every_stage_alike(world):
    """deepspeedai/DeepSpeed#8152: stages before the last got the factor once more each."""
    for found, _, _ in gradients(world, *(("1f1b", [[1]] * count) for count in (1, 2, 8))):
        assert set(found.values()) == {1.0} and len(found) == world


def test_rounds_of_micro_batches_weigh_the_same():
    """pytorch/torchtitan#1733: earlier rounds faded away. The mean of 1 to 6 is 3.5."""
    rounds = [[v] for v in range(1, 7)]
    for schedule, (found, _, _) in zip(SCHEDULES, gradients(2, *((s, rounds) for s in SCHEDULES)), strict=True):
        assert set(found.values()) == {3.5}, schedule


def test_the_loss_is_divided_by_its_tokens_before_backward():
    """pytorch/torchtitan#2972: the reported loss was divided and the gradient was not; here, with padding of uneven length."""
    ((found, _, _),) = gradients(2, ("1f1b", [[4, 0, 0], [1, 2, 3], [0, 0, 0], [5, 6, 0]]))
    assert set(found.values()) == {21 / 6}


def test_the_norm_is_that_of_all_stages():
    """pytorch/torchtitan#596: the clip factor came from the own stage. Gradients 3 and 4, norm 5, clipped 0.6 and 0.8."""
    start = {"blocks.0.weight": 4.0, "blocks.1.weight": 3.0}
    ((found, norms, weights),) = gradients(2, ("1f1b", [[1], [1]], start, 1.0))
    assert found == {"blocks.0.weight": 3.0, "blocks.1.weight": 4.0}
    assert norms == [5.0, 5.0]
    assert weights == pytest.approx({"blocks.0.weight": 3.4, "blocks.1.weight": 2.2}, abs=1e-5)
