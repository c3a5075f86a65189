"""Hooks of configuring, planning and building. Nothing here imports torch before a model is planned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Cost, Transform
from partita_example.config import ExampleConfig

if TYPE_CHECKING:
    from torch import nn

    from partita.plan.draft import PlanDraft
    from partita.plan.plan import Plan

CAP = "example_cap"  # this plug-in's own value in the plan


@hookimpl
def partita_config() -> ConfigContribution:
    """Options from `partita_example_conf`, and node `example`. No section of the plan: they all have owners."""
    return ConfigContribution(packages=("partita_example_conf",), nodes={"example": ExampleConfig})


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """The cap goes into the plan, so that every rank has it and the run's folder tells of it."""
    if draft.config.example.cap:
        draft.extend(CAP, draft.config.example.cap)


@hookimpl
def partita_check(draft: PlanDraft) -> list[Problem]:
    """Values that make no sense."""
    config = draft.config.example
    problems = []
    if not math.isfinite(config.cap) or config.cap < 0:
        problems.append(
            Problem("example.cap", f"logits can't be kept within {config.cap:g}.", "Give a positive number, or 0 for no cap.")
        )
    if config.report_every < 0:
        reason = f"a report each {config.report_every} steps is none."
        problems.append(Problem("example.report_every", reason, "Give a number of steps, or 0 for no report."))
    return problems


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """The capped logits of one micro-batch are kept for backward."""
    if CAP not in plan.extensions:
        return []
    from partita.data.tokenizer import vocab_size
    from partita.state.layout import size_of

    numbers = plan.schedule.micro_batch * draft.config.data.sequence * vocab_size(draft.config)
    return [Cost("activations", "capped logits", numbers * size_of(plan.precision.compute))]


@hookimpl
def partita_transforms(plan: Plan) -> list[Transform]:
    """Cap the logits, after the model is cut and before it is compiled."""
    if CAP not in plan.extensions:
        return []

    def apply(model: nn.Module, run: Any) -> nn.Module:
        from partita_example.softcap import cap_logits

        return cap_logits(model, plan.extensions[CAP])

    return [Transform("example_softcap", apply, after=("expert_parallel",), before=("compile",))]


@hookimpl
def partita_slots() -> dict[str, Sequence[str]]:
    """What `partita_provide` answers."""
    return {"kernel": ["example_exact"], "optimizer": ["example_lion"], "lr_schedule": ["example_parabola"]}


@hookimpl
def partita_provide(slot: str, name: str) -> Any:
    """Builders, imported when one is asked for."""
    if (slot, name) == ("kernel", "example_exact"):
        from partita_example.norm import make_exact

        return make_exact
    if (slot, name) == ("optimizer", "example_lion"):
        from partita_example.lion import make_lion

        return make_lion
    if (slot, name) == ("lr_schedule", "example_parabola"):
        from partita_example.parabola import make_parabola

        return make_parabola
    return None
