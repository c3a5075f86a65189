"""Decides sections `layout` and `schedule`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Layout, Plan, Schedule
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_parallel.batch import solve_batch, whole_batch
from partita_parallel.config import ParallelConfig
from partita_parallel.cutting import check_cuts, cut_options
from partita_parallel.degrees import as_count, expert_count, read_degrees
from partita_parallel.pipeline_plan import check_pipeline, schedule_name, with_course, with_stages

OTHERS = ("default", "auto")


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `parallel`, sections `layout` and `schedule`."""
    return ConfigContribution(nodes={"parallel": ParallelConfig}, sections=("layout", "schedule"))


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """Degrees, stage cuts and the way a global batch is worked through."""
    config, train = draft.config.parallel, draft.config.train
    degrees = read_degrees(config, getattr(draft.config, "zero", None), train.global_batch, expert_count(draft.model))
    layout = degrees.solve(draft.cluster)
    name = schedule_name(draft, layout.pipeline)
    layout = replace(with_stages(draft, layout, name), **cut_options(draft, layout))
    problems = list(degrees.problems)
    micro = as_count("train.micro_batch", train.micro_batch, problems)
    count = as_count("parallel.microbatches", config.microbatches, problems)
    whole = as_count("train.global_batch", train.global_batch, problems) or whole_batch(layout, micro, count)
    batch, found = solve_batch(whole, layout, micro, count)
    for problem in problems + found:
        draft.problem(problem)
    schedule = Schedule(whole, batch.micro_batch, batch.micro_batches, name)
    draft.write("layout", layout)
    draft.write("schedule", with_course(draft, schedule, layout))
    if train.global_batch == "auto":
        draft.effect("train.global_batch", "auto", whole, "data ranks x micro-batch x micro-batches")
    _tell(draft, layout, {"train.micro_batch": batch.micro_batch, "parallel.microbatches": batch.micro_batches})


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
    layout, others = plan.layout, draft.config.parallel.others
    problems = [*check_pipeline(plan, draft), *check_cuts(layout, draft)]
    if others not in OTHERS:
        problems.append(Problem("parallel.others", f"{others!r} is no choice.", did_you_mean(others, OTHERS).capitalize()))
    if layout.data % layout.expert:
        reason = f"{layout.expert} expert ranks fold over the data ranks, and {layout.data} can't be divided by {layout.expert}."
        problems.append(Problem("parallel.expert", reason, "Use a divisor of parallel.data."))
    return problems
