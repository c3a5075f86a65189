"""Decides sections `layout` and `schedule`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Layout, Plan, Schedule
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_parallel.batch import solve_batch, whole_batch
from partita_parallel.config import ParallelConfig
from partita_parallel.cutting import check_cuts, cut_options
from partita_parallel.degrees import as_count, read_degrees

if TYPE_CHECKING:
    from partita.plan.model_spec import ModelSpec

OTHERS = ("default", "auto")
SCHEDULES = ("1f1b", "interleaved", "zbv", "dualpipev")


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `parallel`, sections `layout` and `schedule`."""
    return ConfigContribution(nodes={"parallel": ParallelConfig}, sections=("layout", "schedule"))


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """Degrees, stage cuts and the way a global batch is worked through."""
    config, train = draft.config.parallel, draft.config.train
    experts = max((p.shape[0] for p in draft.model.parameters if p.experts), default=0)
    degrees = read_degrees(config, getattr(draft.config, "zero", None), train.global_batch, experts)
    layout = degrees.solve(draft.cluster)
    layout = replace(layout, stage_cuts=cut_stages(draft.model, layout.pipeline), **cut_options(draft, layout))
    problems = list(degrees.problems)
    micro = as_count("train.micro_batch", train.micro_batch, problems)
    count = as_count("parallel.microbatches", config.microbatches, problems)
    whole = as_count("train.global_batch", train.global_batch, problems) or whole_batch(layout, micro, count)
    batch, found = solve_batch(whole, layout, micro, count)
    for problem in problems + found:
        draft.problem(problem)
    name = _schedule(draft, config.schedule, layout)
    draft.write("layout", layout)
    draft.write("schedule", Schedule(whole, batch.micro_batch, batch.micro_batches, name))
    if train.global_batch == "auto":
        draft.effect("train.global_batch", "auto", whole, "data ranks x micro-batch x micro-batches")
    _tell(draft, layout, {"train.micro_batch": batch.micro_batch, "parallel.microbatches": batch.micro_batches})


def cut_stages(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """First unit of each stage but the first, so that the parameters of the blocks are spread as evenly as whole blocks allow.

    Indices count `model.units`. Fewer cuts come back where there are fewer blocks than stages (the check says so).
    """
    blocks = [(i, u.numel) for i, u in enumerate(model.units) if u.name != model.root]
    if stages <= 1 or not blocks:
        return ()
    total, seen = sum(n for _, n in blocks), 0
    cuts: list[int] = []
    for index, numel in blocks:
        # a stage begins where at least its predecessors' share of the parameters lies behind
        if index != blocks[0][0] and len(cuts) + 1 < stages and seen * stages >= (len(cuts) + 1) * total:
            cuts.append(index)
        seen += numel
    return tuple(cuts)


def _schedule(draft: PlanDraft, asked: str, layout: Layout) -> str:
    if asked != "auto" and asked != "none" and asked not in SCHEDULES:
        remedy = did_you_mean(asked, (*SCHEDULES, "auto")).capitalize()
        draft.problem(Problem("parallel.schedule", f"{asked!r} is no pipeline schedule.", remedy))
        asked = "auto"
    if layout.pipeline == 1:
        if asked in SCHEDULES:
            draft.effect("parallel.schedule", asked, "none", "parallel.pipeline is 1: there is one stage only")
        return "none"
    if asked == "none":
        draft.problem(
            Problem(
                "parallel.schedule",
                f"{layout.pipeline} stages need a schedule.",
                "Use auto, or one of " + ", ".join(SCHEDULES) + ".",
            )
        )
    return asked if asked in SCHEDULES else "1f1b"


def _tell(draft: PlanDraft, layout: Layout, batch: dict[str, int]) -> None:
    """What every `auto` came to."""
    config: Any = draft.config
    why = (
        f"{draft.cluster.ranks} ranks ({draft.cluster.ranks_from})"
        if draft.cluster.ranks
        else "no accelerator: as many ranks as the layout asks for"
    )
    for axis in ("data", "replicate", "shard", "pipeline", "context", "tensor", "expert"):
        if getattr(config.parallel, axis) == "auto":
            draft.effect(f"parallel.{axis}", "auto", getattr(layout, axis), why if axis == "data" else "")
    asked = {"train.micro_batch": config.train.micro_batch, "parallel.microbatches": config.parallel.microbatches}
    for key, got in batch.items():
        if asked[key] == "auto":
            draft.effect(key, "auto", got, f"{draft.get('schedule').global_batch} sequences over {layout.data} data ranks")


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Degrees that the model or the batch can't be divided by."""
    layout, schedule, others = plan.layout, plan.schedule, draft.config.parallel.others
    problems = []
    if others not in OTHERS:
        problems.append(Problem("parallel.others", f"{others!r} is no choice.", did_you_mean(others, OTHERS).capitalize()))
    if layout.pipeline > 1 and len(layout.stage_cuts) != layout.pipeline - 1:
        reason = f"{layout.pipeline} stages can't be made of {len(draft.model.blocks)} blocks."
        problems.append(Problem("parallel.pipeline", reason, f"Use at most {len(draft.model.blocks)} stages."))
    if layout.pipeline > schedule.micro_batches:
        reason = f"{layout.pipeline} stages work on {schedule.micro_batches} micro-batches: most of them would wait."
        remedy = f"Set parallel.microbatches to {layout.pipeline} or more, or make train.global_batch larger."
        problems.append(Problem("parallel.pipeline", reason, remedy))
    problems += check_cuts(layout, draft)
    if layout.data % layout.expert:
        reason = f"{layout.expert} expert ranks fold over the data ranks, and {layout.data} can't be divided by {layout.expert}."
        problems.append(Problem("parallel.expert", reason, "Use a divisor of parallel.data."))
    return problems
