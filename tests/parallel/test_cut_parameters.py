"""Clipping and saving of cut parameters: each element counts once, however many ranks hold it.

Public reports: NVIDIA-NeMo/RL PR#3788, pytorch/torchtitan#596 (norms over tensor ranks), PrimeIntellect-ai/prime-rl PR#1957 (partial sums).
"""

from __future__ import annotations

from functools import cache

import cut_engine
import pytest
import torch
from packed import packed
from pool import run_ranks

GRADIENT = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
LAYOUTS = [(2, 0, 2), (3, 0, 3), (4, 0, 2), (4, 1, 2), (4, 2, 2), (4, 3, 2), (2, 3, 1)]  # ranks, ZeRO stage, tensor
STEPS = [(1, 0.0), (3, 0.0), (1, 1.0)]  # micro-batches, clip


@cache
def steps_of(world):
    """(stage, tensor, micro-batches, clip) -> what each rank returns, in one start of the ranks."""
    calls = [(stage, tensor, *step) for ranks, stage, tensor in LAYOUTS if ranks == world for step in STEPS]
    return dict(zip(calls, zip(*run_ranks(world, packed, cut_engine.one_step, calls), strict=True), strict=True))


@pytest.mark.parametrize(("world", "stage", "tensor"), LAYOUTS)
@pytest.mark.parametrize("parts", [1, 3])
def test_one_step_without_clipping(world, stage, tensor, parts):
    for rank in steps_of(world)[stage, tensor, parts, 0.0]:
        assert rank["norm"] == pytest.approx(13.0)  # of 3, 4 and 12
        for kind in ("gradients", "moved"):
            torch.testing.assert_close(rank[kind]["matrix"], GRADIENT)
            assert float(rank[kind]["whole"]) == pytest.approx(4.0) and float(rank[kind]["terms"]) == pytest.approx(12.0)


@pytest.mark.parametrize(("world", "stage", "tensor"), LAYOUTS)
def test_clipped_gradients_have_the_norm_asked_for(world, stage, tensor):
    for rank in steps_of(world)[stage, tensor, 1, 1.0]:
        moved = rank["moved"]
        torch.testing.assert_close(moved["matrix"], GRADIENT / 13, atol=1e-6, rtol=0)
        assert float(moved["whole"]) == pytest.approx(4 / 13) and float(moved["terms"]) == pytest.approx(12 / 13)


@pytest.mark.parametrize(("world", "stage", "tensor"), LAYOUTS)
def test_each_element_is_saved_once(world, stage, tensor):
    ranks = [r["slices"] for r in steps_of(world)[stage, tensor, 1, 0.0]]
    for key, size in (("model.matrix", 6), ("model.whole", 1), ("model.terms", 1)):
        assert sorted(i for r in ranks for i in r.get(key, ())) == list(range(size))
