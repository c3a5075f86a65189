"""The planned peak against the tensors that were really alive, seen from outside of the framework."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import peak_runs
from pool import run_ranks

from partita.plan.estimate import memory_total

SEQUENCE, LAYERS = 64, 6
HOST = {"offload__optimizer": "host", "offload__gradients": "host"}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"train__global_batch": 16},
    "host": HOST,
    "recompute": {"recompute__policy": "full"},
    "operators": {"recompute__policy": "operators"},
    "budget": {"recompute__policy": "budget", "recompute__budget": 6e6},
    "activations on the host": {"offload__activations": "host"},
}
# what happens to activations has little to do with how states are cut
CASES = [
    (stage, mode) for mode in MODES for stage in (0, 1, 2, 3) if stage in (0, 3) or mode in ("plain", "accumulation", "host")
]


@pytest.mark.parametrize(("stage", "mode"), CASES)
def test_peak_of_live_tensors_is_the_planned_one(plan_of: Any, stage: int, mode: str) -> None:
    changes = {"train__micro_batch": 4, "train__global_batch": 8, "data__sequence": SEQUENCE, "model__layers": LAYERS} | MODES[
        mode
    ]
    if stage == 3 and mode == "host":
        changes["offload__parameters"] = "host"
    planned = plan_of(launch__ranks=2, zero__stage=stage, **changes)
    assert not planned.problems
    if mode == "budget":
        assert {d for _, d in planned.plan.activations.units} == {"full"}
        assert len(planned.plan.activations.units) < LAYERS, "some blocks are recomputed, not all"
    model, vocab = planned.draft.config.model, planned.model.parameters[0].shape[0]
    sizes = (model.layers, model.width, model.heads, vocab)
    predicted = memory_total(planned.costs)
    for live, host in run_ranks(2, peak_runs.peak, planned.plan, sizes, SEQUENCE, timeout=60):
        assert live == pytest.approx(predicted, rel=0.05), {c.what: c.bytes for c in planned.costs if c.place == "accelerator"}
        if mode == "host":
            assert host == memory_total(planned.costs, "host")
