"""Decides what a pipeline adds to the sections `layout` and `schedule`, checks it, and states its costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Layout, Plan, Schedule
from partita.plan.problems import Problem
from partita_parallel.degrees import as_count
from partita_parallel.pipeline_cut import cut_by_cost, cut_by_count, model_costs
from partita_parallel.pipeline_order import FIXED, SCHEDULES, SPLIT, STAGES, course_of, legal_micro_batches, place_stages

GATHERS = ("action", "run", "step")


def schedule_name(draft: PlanDraft, pipeline: int) -> str:
    """The schedule in effect; `none` without stages."""
    asked = draft.config.parallel.schedule
    if asked not in ("auto", "none", *SCHEDULES):
        remedy = did_you_mean(asked, (*SCHEDULES, "auto")).capitalize()
        draft.problem(Problem("parallel.schedule", f"{asked!r} is no pipeline schedule.", remedy))
        asked = "auto"
    if pipeline == 1:
        if asked in SCHEDULES:
            draft.effect("parallel.schedule", asked, "none", "parallel.pipeline is 1: there is one stage only")
        return "none"
    if asked == "none":
        remedy = "Use auto, or one of " + ", ".join(SCHEDULES) + "."
        draft.problem(Problem("parallel.schedule", f"{pipeline} stages need a schedule.", remedy))
    return asked if asked in SCHEDULES else "1f1b"


def with_stages(draft: PlanDraft, layout: Layout, name: str) -> Layout:
    """The layout with its stages placed and cut. Fewer cuts where there are fewer blocks than stages: the check says so."""
    if layout.pipeline == 1:
        return layout
    each = _stages_of_rank(draft, name)
    place = place_stages(name, layout.pipeline, each)
    sizes = _sizes(draft, len(place))
    first = next((i for i, u in enumerate(draft.model.units) if u.name != draft.model.root), 0)
    cuts = tuple(first + n for n in accumulate(sizes[:-1]))
    return replace(layout, stage_cuts=cuts, stage_ranks=place)


def _stages_of_rank(draft: PlanDraft, name: str) -> int:
    """Stages of each rank, as asked where the schedule leaves a choice."""
    problems: list[Problem] = []
    asked = as_count("parallel.stages_per_rank", draft.config.parallel.stages_per_rank, problems)
    fixed = FIXED.get(name)
    if asked is not None and fixed is not None and asked != fixed:
        remedy = f"Leave it on auto, or use parallel.schedule=interleaved, which takes any number ({name} takes {fixed})."
        problems.append(Problem("parallel.stages_per_rank", f"{name} has {fixed} for each rank, not {asked}.", remedy))
    if asked == 1 and fixed is None:
        problems.append(
            Problem("parallel.stages_per_rank", f"{name} with one stage for each rank is 1f1b.", "Use 2 or more, or 1f1b.")
        )
    for problem in problems:
        draft.problem(problem)
    return fixed or max(2, asked or STAGES[name][0])


def _sizes(draft: PlanDraft, stages: int) -> list[int]:
    """Blocks of each stage."""
    config, count = draft.config.parallel, len(draft.model.blocks)
    if count < stages:
        return [1] * count
    if config.stages:
        sizes = [int(n) for n in config.stages]
        if len(sizes) == stages and sum(sizes) == count and min(sizes) > 0:
            return sizes
        reason = f"{sizes} does not give {stages} stages all of the {count} blocks, each at least one."
        remedy = f"For instance {cut_by_count(count, stages)}."
        draft.problem(Problem("parallel.stages", reason, remedy))
    if config.stage_cut not in ("cost", "count"):
        draft.problem(
            Problem("parallel.stage_cut", f"{config.stage_cut!r} is no way to cut.", "Use cost or count, or parallel.stages.")
        )
    if config.stage_cut == "count":
        return cut_by_count(count, stages)
    anatomy = draft.anatomy()
    if anatomy.reason:
        return cut_by_count(count, stages)
    known = draft.cache.setdefault("stages by cost", {})
    if stages not in known:
        known[stages] = cut_by_cost(model_costs(draft.model, anatomy, draft.config.data.sequence), stages)
    return list(known[stages])


def with_course(draft: PlanDraft, schedule: Schedule, layout: Layout) -> Schedule:
    """The schedule with what follows from its orders, and how it treats cut states."""
    config: Any = draft.config.parallel
    schedule = replace(schedule, reduce_every=config.reduce_every)
    if config.reduce_every < 1:
        draft.problem(Problem("parallel.reduce_every", f"{config.reduce_every} micro-batches.", "Use 1 or more."))
    if layout.pipeline == 1:
        return schedule
    gather = "run" if config.gather == "auto" else config.gather
    if gather not in GATHERS:
        draft.problem(Problem("parallel.gather", f"{gather!r} is none.", "Use auto, " + ", ".join(GATHERS) + "."))
        gather = "run"
    if gather == "action" and schedule.name in SPLIT:
        reason = f"{schedule.name} runs backward in halves, and the first one needs a whole stage"
        draft.effect("parallel.gather", "action", "run", reason)
        gather = "run"
    schedule = replace(schedule, gather=gather)
    each = len(layout.stage_ranks) // layout.pipeline
    illegal = legal_micro_batches(schedule.name, layout.pipeline, each, schedule.micro_batches)
    if illegal:
        reason = f"{schedule.micro_batches} micro-batches do not fit: {illegal}."
        remedy = "Change parallel.microbatches (or train.micro_batch), or use parallel.schedule=1f1b, which takes any number."
        draft.problem(Problem("parallel.microbatches", reason, remedy))
        return schedule
    course = course_of(schedule.name, layout.pipeline, each, schedule.micro_batches)
    return replace(schedule, in_flight=course.in_flight, bubble=course.bubble)


def check_pipeline(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Stages that the model can't be cut into, and batches that leave most ranks waiting."""
    layout, schedule, problems = plan.layout, plan.schedule, []
    if layout.pipeline == 1:
        return []
    stages, blocks = len(layout.stage_ranks), len(draft.model.blocks)
    if len(layout.stage_cuts) != stages - 1:
        each = stages // layout.pipeline
        legal = [str(n) for n in range(1, layout.pipeline) if n * each <= blocks]
        reason = f"{stages} stages can't be made of {blocks} blocks."
        problems.append(
            Problem("parallel.pipeline", reason, f"Use {_either(legal)}." if legal else "Use a model with more blocks.")
        )
    if layout.pipeline > schedule.micro_batches:
        reason = f"{layout.pipeline} stages work on {schedule.micro_batches} micro-batches: most of them would wait."
        remedy = f"Set parallel.microbatches to {layout.pipeline} or more, or make train.global_batch larger."
        problems.append(Problem("parallel.pipeline", reason, remedy))
    return problems or _check_model(plan, draft)


def _either(values: list[str]) -> str:
    return "1" if values == ["1"] else f"one of {', '.join(values)}"


def _check_model(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Each stage must run on its own; it is tried on the meta device."""
    from partita.plan.stages import stage_units  # torch is imported only where a plan is made
    from partita_parallel.pipeline_split import copies_problem, try_stages

    anatomy, blocks = draft.anatomy(), stage_units(draft.model, plan.layout)
    reason = anatomy.reason or copies_problem(draft.model, plan.layout, blocks, anatomy)
    reason = reason or try_stages(draft.model.module, anatomy, plan.layout, blocks)[1]
    if not reason:
        return []
    remedy = "Use parallel.pipeline=1; parallel.shard with zero.stage=3 saves the same memory."
    return [Problem("parallel.pipeline", f"the model can't be cut into stages: {reason}.", remedy)]
