"""Layouts that are compared with one rank: each axis alone, the presets, and combinations of axes, ZeRO stages, schedules and offload.

Shared by test_combinations.py, which runs a few of them, and scripts/bench/layouts.py, which runs all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from layouts import spec_of, stepped
from pool import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")
# plain SGD shows a scale that Adam would hide; without clipping, so does the norm
SGD = ("optimizer=sgd", "optimizer.lr=0.05", "train.grad_clip=0", "model.dropout=0.1")
DEEP = (*SGD, "model.layers=4")
DEEPER = (*SGD, "model.layers=8", "train.global_batch=16")
ODD = (*SGD, "model.layers=5", "model.vocab=301", "model.ffn=97", "model.heads=6", "model.width=36")
EXPERTS = (*DEEP, "moe=mixtral", "moe.experts=4")
CUBE = ("parallel.pipeline=2", "parallel.tensor=2", "parallel.data=2", "train.micro_batch=1")
P2D2 = ("parallel.pipeline=2", "parallel.data=2", "train.micro_batch=1")
SEQUENCE = "parallel.sequence_parallel=true"


@dataclass(frozen=True)
class Case:
    """One layout of one model. model: overrides that the reference has, too."""

    name: str
    model: tuple[str, ...]
    layout: tuple[str, ...]


def alone() -> list[Case]:
    """Each axis with 2 and with 4 ranks."""
    cases = []
    for n in (2, 4):
        one = ("parallel.data=1", f"train.micro_batch={8 // n}")
        axes = {
            "replicate": (f"parallel.replicate={n}", "parallel.shard=1"),
            "shard": (f"parallel.data={n}", "+strategy=zero3"),
            "tensor": (*one, f"parallel.tensor={n}"),
            "sequence": (*one, f"parallel.tensor={n}", SEQUENCE),
            "context": (*one, "parallel=context", f"parallel.context={n}"),
            "ulysses": (*one, "parallel=ulysses", f"parallel.context={n}"),
            "pipeline": ("parallel.data=1", f"parallel.pipeline={n}", f"train.micro_batch={8 // n // 2}"),
        }
        cases += [Case(f"{axis} {n}", DEEP, layout) for axis, layout in axes.items()]
    return cases


def presets() -> list[Case]:
    """The options of the group `parallel` as they are."""
    names = ("data", "tensor", "sequence", "context", "ulysses", "pipeline", "2d", "3d", "auto")
    return [Case(f"parallel={name}", DEEP, (f"parallel={name}",)) for name in names]


def pipelines() -> list[Case]:
    """Pipeline x tensor x shard with every schedule and every ZeRO stage, and pipeline x shard where states are cut."""
    cube = [
        Case(f"3d zero{z} {s}", DEEP, (*CUBE, f"+strategy=zero{z}", f"parallel.schedule={s}"))
        for s, z in product(SCHEDULES, range(4))
    ]
    flat = [
        Case(f"pipeline x shard zero{z} {s}", ODD, (*P2D2, f"+strategy=zero{z}", f"parallel.schedule={s}"))
        for s, z in product(SCHEDULES, (2, 3))
    ]
    deep = [
        Case(f"pipeline 4 x shard zero3 {s}", DEEPER, ("parallel.pipeline=4", "parallel.data=2", "train.micro_batch=1", "+strategy=zero3",
                                                       f"parallel.schedule={s}"))
        for s in ("1f1b", "zbv")
    ]  # fmt: skip
    return cube + flat + deep


def mixed() -> list[Case]:
    """Context, sequence, groups, tiers, recompute and experts with other axes."""
    c2 = ("parallel.context=2", "parallel=context", "parallel.data=2", "train.micro_batch=1")
    found: dict[str, tuple[str, ...]] = {
        **{
            f"context x pipeline x shard zero{z} {s}": (*c2, "parallel.pipeline=2", f"+strategy=zero{z}", f"parallel.schedule={s}")
            for z, s in product((2, 3), ("1f1b", "zbv"))
        },
        "context x tensor x shard zero3": (*c2, "parallel.tensor=2", "+strategy=zero3"),
        "ulysses x tensor x shard zero2": (*c2, "parallel.context_method=ulysses", "parallel.tensor=2", "+strategy=zero2"),
        "sequence 3d zero1 1f1b": (*CUBE, SEQUENCE, "+strategy=zero1"),
        "sequence 3d zero3 interleaved": (*CUBE, SEQUENCE, "+strategy=zero3", "parallel.schedule=interleaved"),
        "sequence 3d zero2 zbv": (*CUBE, SEQUENCE, "+strategy=zero2", "parallel.schedule=zbv"),
        "hsdp x tensor": ("+strategy=hsdp", "parallel.replicate=2", "parallel.shard=2", "parallel.tensor=2", "train.micro_batch=1"),
        "hsdp x pipeline 1f1b": ("+strategy=hsdp", "parallel.replicate=2", "parallel.shard=2", "parallel.pipeline=2", "train.micro_batch=1"),
        "hsdp x pipeline zbv": ("+strategy=hsdp", "parallel.replicate=2", "parallel.shard=2", "parallel.pipeline=2", "train.micro_batch=1",
                                "parallel.schedule=zbv"),
        "hpz x pipeline": ("+strategy=hpz", "parallel.replicate=2", "parallel.shard=2", "parallel.pipeline=2", "train.micro_batch=1"),
        "3d zero3 gather=action": (*CUBE, "+strategy=zero3", "parallel.gather=action"),
        "3d zero3 gather=step": (*CUBE, "+strategy=zero3", "parallel.gather=step", "parallel.schedule=interleaved"),
        "3d zero2 reduce_every=3": (*CUBE, "+strategy=zero2", "parallel.reduce_every=3"),
        "3d zero1 host": (*CUBE, "+strategy=zero1_offload"),
        "3d zero2 host interleaved": (*CUBE, "+strategy=zero2_offload", "parallel.schedule=interleaved"),
        "3d zero3 host": ("+strategy=zero3", "parallel=3d", "offload=host"),
        "3d zero3 host zbv": (*CUBE, "+strategy=zero3_offload", "parallel.schedule=zbv"),
        "3d zero3 files": (*CUBE, "+strategy=zero_infinity"),
        "3d zero3 files zbv": (*CUBE, "+strategy=zero_infinity", "parallel.schedule=zbv"),
        "pipeline x shard zero3 host activations": (*P2D2, "+strategy=zero3", "offload.activations=host"),
        "3d zero3 recompute": (*CUBE, "+strategy=zero3", "recompute=full"),
        "3d zero3 recompute zbv": (*CUBE, "+strategy=zero3", "recompute=full", "parallel.schedule=zbv"),
        "3d zero3 selective interleaved": (*CUBE, "+strategy=zero3", "recompute=selective", "parallel.schedule=interleaved"),
    }  # fmt: skip
    experts = {
        "expert 2 x pipeline zero1": (*P2D2, "parallel.expert=2", "+strategy=zero1"),
        "expert 2 x tensor zero3": (
            "parallel.data=2",
            "parallel.expert=2",
            "parallel.tensor=2",
            "train.micro_batch=2",
            "+strategy=zero3",
        ),
        "cut experts 3d zero2": (*CUBE, "parallel.expert=2", "moe.tensor=cut", "+strategy=zero2"),
        "cut experts sequence 3d zero3 zbv": (
            *CUBE,
            SEQUENCE,
            "parallel.expert=2",
            "moe.tensor=cut",
            "+strategy=zero3",
            "parallel.schedule=zbv",
        ),
    }
    return [*(Case(n, DEEP, v) for n, v in found.items()), *(Case(n, EXPERTS, v) for n, v in experts.items())]


def all_cases() -> list[Case]:
    """All of them; names are unique."""
    return [*alone(), *presets(), *pipelines(), *mixed()]


def run_cases(cases: list[Case], folder: Path, steps: int, limit: float = 120.0) -> list[Any]:
    """What `layouts.stepped` returns on rank 0 for each case, in one call of as many ranks as all of these cases take.

    Raises ConfigError for a plan with problems, RankError where a rank fails or hangs.
    """
    specs = [spec_of(folder / str(i), *case.model, *case.layout) for i, case in enumerate(cases)]
    (ranks,) = {s.ranks for s in specs}
    found: list[Any] = run_ranks(ranks, one_after_the_other, specs, steps, timeout=limit * len(cases))[0]
    return found


def one_after_the_other(rank: int, world: int, specs: list[Any], steps: int) -> list[Any]:
    """Several runs on the same ranks."""
    return [stepped(rank, world, spec, steps, {"evaluate": True}) for spec in specs]


def off(got: Any, expected: Any) -> tuple[float, float, float]:
    """Largest relative differences of losses, of norms, and of the evaluation's loss."""

    def worst(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    return (
        worst(got["losses"], expected["losses"]),
        worst(got["norms"], expected["norms"]),
        worst([got["eval"]], [expected["eval"]]),
    )
