"""Each method with each ZeRO stage, accumulation, offload, and tensor or pipeline parallelism: right within its error, or refused with a reason.

A few of them by default, all with PARTITA_LONG_TESTS=1.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "train"), str(Path(__file__).parents[1] / "distributed")]

import layout_matrix
from pool import run_ranks

STEPS = 8


class Method(NamedTuple):
    """overrides: what it adds. rule: the update rule of the run that it is compared with. error: relative, of the losses' mean."""

    overrides: tuple[str, ...]
    rule: str = "sgd"
    error: float = 1e-2


FEEDBACK = "compression.error_feedback=true"
METHODS: dict[str, Method] = {
    "bf16": Method(("compression=bf16",)),
    "int8": Method(("compression=int8",)),
    "int8 with feedback": Method(("compression=int8", FEEDBACK)),
    "fp8": Method(("compression=int8", "compression.gradient_reduce=fp8")),
    "int4": Method(("compression=int8", "compression.gradient_reduce=int4", FEEDBACK), error=2e-2),
    "int8 both ways": Method(("compression=int8", "compression.parameter_gather=int8")),
    "two levels": Method(("compression=int8", "compression.algorithm=hierarchical", "compression.node_ranks=2")),
    "onebit": Method(("compression=onebit",), error=5e-2),
    "topk": Method(("compression=topk", "compression.density=0.1"), error=5e-2),
    "powersgd": Method(("compression=powersgd",), error=5e-2),
    "onebit_adam": Method(("optimizer=onebit_adam",), "adamw", 5e-2),
    "onebit_lamb": Method(("optimizer=onebit_lamb",), "lamb", 5e-2),
    "zero_one_adam": Method(("optimizer=zero_one_adam", "optimizer.options.var_update_scaler=2"), "adamw", 5e-2),
}
STAGES = (0, 1, 2, 3)
MICRO = {"once": (), "accumulated": ("train.micro_batch=2",)}
OFFLOAD = {"here": (), "host": ("offload=host",)}
MODEL = {
    "data": ("parallel.data=2",),
    "tensor": ("parallel=tensor", "parallel.tensor=2", "parallel.data=2"),
    "pipeline": ("parallel=pipeline", "parallel.pipeline=2", "parallel.data=2"),
}
RATES = {"sgd": "optimizer.lr=0.2", "adamw": "optimizer.lr=1e-3", "lamb": "optimizer.lr=1e-2"}
Combination = tuple[str, int, str, str, str]
ALL: list[Combination] = list(itertools.product(METHODS, STAGES, MICRO, OFFLOAD, MODEL))
SOME: list[Combination] = [
    ("onebit_adam", 2, "accumulated", "host", "tensor"),
    ("int8 both ways", 2, "accumulated", "host", "data"),
    ("powersgd", 1, "once", "here", "pipeline"),
    ("topk", 3, "accumulated", "here", "data"),
    ("onebit_lamb", 1, "once", "here", "tensor"),
]


def refused(method: str, offload: str, model: str) -> str:
    """The key that a combination is refused by; empty where it must work."""
    if method == "onebit_lamb" and (offload == "host" or model == "tensor"):
        return "optimizer.name"  # it needs whole tensors
    return ""


def losses(overrides: tuple[str, ...], folder: Path) -> list[float] | str:
    """Of a training, or why it is refused."""
    spec = layout_matrix.spec_of((*overrides, "train.grad_clip=0", f"train.steps={STEPS}"), folder, "never")
    if isinstance(spec, str):
        return spec
    found: list[float] = run_ranks(spec.ranks, layout_matrix.play, spec, "", STEPS, 0)[0]
    return found


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory):
    """Losses of one plain rank under an update rule, computed once."""
    known: dict[str, Any] = {}

    def of(rule: str) -> list[float]:
        if rule not in known:
            known[rule] = losses((f"optimizer={rule}", RATES[rule], "parallel.data=1"), tmp_path_factory.mktemp("plain"))
        return known[rule]

    return of


def chosen() -> list[Any]:
    """All combinations; those beyond a few on request."""
    rest = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="hundreds: PARTITA_LONG_TESTS=1 runs them")
    ordered = [*SOME, *(c for c in ALL if c not in SOME)]
    return [pytest.param(c, id="-".join(map(str, c)), marks=[rest] * (i >= len(SOME))) for i, c in enumerate(ordered)]


@pytest.mark.parametrize("combination", chosen())
def test_a_method_with(combination: Combination, reference, tmp_path: Path) -> None:
    name, stage, micro, offload, model = combination
    method = METHODS[name]
    rule = () if "optimizer=" in method.overrides[0] else (f"optimizer={method.rule}",)
    overrides = (
        *rule,
        RATES[method.rule],
        f"zero.stage={stage}",
        *MICRO[micro],
        *OFFLOAD[offload],
        *MODEL[model],
        *method.overrides,
    )
    got, key = losses(overrides, tmp_path), refused(name, offload, model)
    if key:
        assert isinstance(got, str) and got.startswith(f"{key}: ")
        return
    assert not isinstance(got, str), got
    want = reference(method.rule)
    assert got[0] == pytest.approx(want[0], rel=2e-2)
    assert sum(got) == pytest.approx(sum(want), rel=method.error)
    assert got[1:] != want[1:]
