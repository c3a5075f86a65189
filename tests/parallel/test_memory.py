"""The plan's bytes against those on the ranks: states exactly, the peak of a whole update within 10 %."""

from __future__ import annotations

import pytest
from layouts import all_ranks, planned

from partita.plan.estimate import memory_total

SIZES = (
    "model.width=64", "model.heads=4", "model.layers=3", "data.sequence=128", "train.global_batch=8", "train.steps=2", "parallel.data=1",
)  # fmt: skip
TENSOR = "parallel.tensor=2"
LAYOUTS = [
    (),
    ("model.dropout=0.1",),
    (TENSOR,),
    (TENSOR, "parallel.sequence_parallel=true"),
    ("parallel.tensor=4", "model.vocab=257"),
    (TENSOR, "model=llama", "model.kv_heads=2"),
    (TENSOR, "parallel=context"),
    (TENSOR, "precision=bf16"),
    (TENSOR, "parallel.data=2", "+strategy=zero2", "train.micro_batch=2"),
    (TENSOR, "parallel.data=2", "+strategy=zero3"),
    ("parallel=context",),
    ("parallel=ulysses", "model=llama"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: "-".join(x.split("=")[-1] for x in v) or "one")
def test_bytes_are_those_of_the_plan(tmp_path, layout):
    overrides = (*SIZES, *(() if "model.dropout=0.1" in layout else ("model.dropout=0",)), *layout)
    plan = planned(*overrides)[0]
    ranks = all_ranks(tmp_path, *overrides, steps=2, peak=True)
    states = plan.draft.state_bytes(plan.plan)
    assert {kind: max(r["held"][kind] for r in ranks) for kind in states} == states
    peak = max(r["peak"] for r in ranks)
    assert memory_total(plan.costs) == pytest.approx(peak, rel=0.1)
