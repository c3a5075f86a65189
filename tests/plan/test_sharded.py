"""Plans against the engine, on two ranks: bytes of states, and recompute under sharded weights."""

from __future__ import annotations

import pytest
import sharded_recompute
from pool import run_ranks

from partita.plan.plan import Activations, Placement, Precision

CUT = ("replicate", "shard")
PLACEMENTS = {"0": Placement(), "1": Placement(optimizer=CUT), "2": Placement((), CUT, CUT), "3": Placement(CUT, CUT, CUT)}
KEEP = Activations()


def run(placement, activations=KEEP, precision=None, parts=1):
    return run_ranks(2, sharded_recompute.train, PLACEMENTS[placement], activations, precision or Precision(), parts, timeout=60)


SETTINGS = [
    Activations("full"),
    Activations("selective", patterns=("*attention*", "mlp")),
    Activations("operators", operators=("matmul", "attention")),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recompute_changes_no_number(placement):
    kept = run(placement, parts=2)[0]
    for setting in SETTINGS:
        assert run(placement, setting, parts=2)[0][:2] == kept[:2], setting


@pytest.mark.parametrize("precision", [Precision(), Precision(compute="bfloat16", reduce="bfloat16")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_states_held_are_the_states_planned(placement, precision):
    for _, _, held, planned in run(placement, precision=precision, parts=2):
        if placement == "1":
            # the whole gradient is in the buffer pool between steps
            assert planned.pop("gradients") > held.pop("gradients")
        assert held == planned
