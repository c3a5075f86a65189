"""The plan's bytes against those on the ranks: states exactly, the peak of a whole update within 10 %, of pipelines within the plan's bound."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from layouts import planned, spec_of, stepped
from packed import packed
from pool import run_ranks

from partita.plan.estimate import memory_total

SIZES = (
    "model.width=64", "model.heads=4", "model.layers=3", "data.sequence=128", "train.global_batch=8", "train.steps=2", "parallel.data=1",
)  # fmt: skip
TENSOR = "parallel.tensor=2"
PIPELINE = ("parallel.pipeline=2", "model.layers=4", "train.micro_batch=1")
BOTH = (*PIPELINE, "parallel.data=2")
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
    PIPELINE,
    (*PIPELINE, "parallel.schedule=gpipe"),
    (*PIPELINE, "parallel.schedule=zbv"),
    (*PIPELINE, "recompute=full"),
    (*BOTH, "+strategy=zero1"),
    (*BOTH, "+strategy=zero2"),
    (*BOTH, "+strategy=zero2", "parallel.schedule=interleaved"),
    (*BOTH, "+strategy=zero2", "parallel.reduce_every=4"),
    (*BOTH, "+strategy=zero3"),
    (*BOTH, "+strategy=zero3", "parallel.gather=action"),
    (*BOTH, "+strategy=zero3", "parallel.gather=step"),
    (*BOTH, "+strategy=zero3", "parallel.schedule=zbv"),
]


def overrides_of(layout: tuple[str, ...]) -> tuple[str, ...]:
    return (*SIZES, *(() if "model.dropout=0.1" in layout else ("model.dropout=0",)), *layout)


@cache
def measured(ranks: int) -> dict[tuple[str, ...], list[dict]]:
    """What each rank held, for all layouts of as many ranks."""
    with TemporaryDirectory() as folder:
        specs = {layout: spec_of(Path(folder) / str(i), *overrides_of(layout)) for i, layout in enumerate(LAYOUTS)}
        mine = {layout: (spec, 2, {"peak": True}) for layout, spec in specs.items() if spec.ranks == ranks}
        found = run_ranks(ranks, packed, stepped, list(mine.values()), timeout=170)
    return dict(zip(mine, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: "-".join(x.split("=")[-1] for x in v) or "one")
def test_bytes_are_those_of_the_plan(layout):
    plan = planned(*overrides_of(layout))[0]
    ranks = measured(plan.plan.layout.world)[layout]
    states = plan.draft.state_bytes(plan.plan)
    held = {kind: max(r["held"][kind] for r in ranks) for kind in states}
    if "+strategy=zero1" in layout:  # the whole gradient is in the buffer pool between updates
        assert states.pop("gradients") > held.pop("gradients")
    assert held == states
    peak = max(r["peak"] for r in ranks)
    assert memory_total(plan.costs) == pytest.approx(peak, rel=0.1), {c.what: c.bytes for c in plan.costs if c.bytes}
