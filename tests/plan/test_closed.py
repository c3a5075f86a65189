"""State bytes by merged buckets against the layout that the engine allocates, over many plans; and tracing of alike units."""

from __future__ import annotations

import itertools

import pytest
import torch

from partita.plan import activations
from partita.plan.memory import layout_bytes, state_bytes, state_layouts

CUTS = [{"zero__stage": s} for s in range(4)] + [{"zero__preset": p, "zero__shard_size": 2} for p in ("hsdp", "hpz", "hfsdp")]
MESHES = [{}, {"parallel__tensor": 2}, {"parallel__pipeline": 2}, {"parallel__pipeline": 3, "parallel__tensor": 2}]


@pytest.mark.parametrize(("cut", "mesh"), list(itertools.product(CUTS, MESHES)))
@pytest.mark.parametrize("width", [64, 36])
def test_merged_buckets_have_the_bytes_of_the_layout(plan_of, cut, mesh, width):
    inner = mesh.get("parallel__tensor", 1) * mesh.get("parallel__pipeline", 1)
    for precision, micro in (("fp32", 4), ("bf16", 1)):
        planned = plan_of(
            launch__ranks=4 * inner,
            train__micro_batch=micro,
            precision__name=precision,
            model__width=width,
            model__layers=6,
            train__global_batch=24 if micro == 1 else 48,
            **cut,
            **mesh,
        )
        fullest = max((layout_bytes(x) for x in state_layouts(planned.draft, planned.plan)), key=lambda b: sum(b.values()))
        assert state_bytes(planned.draft, planned.plan) == fullest


def test_units_that_are_alike_are_traced_as_if_each_were_run(plan_of, monkeypatch):
    module = plan_of(model__layers=5).model.module
    names = [f"blocks.{i}" for i in range(5)]
    few = activations.trace_activations(module, names, "root", (2, 16), torch.bfloat16)
    monkeypatch.setattr(activations, "Alike", lambda *_: _Nobody())
    assert activations.trace_activations(module, names, "root", (2, 16), torch.bfloat16) == few
    assert few.units["blocks.4"].kept > 0


class _Nobody:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def copy(self, units):
        """Nothing stood for another."""
