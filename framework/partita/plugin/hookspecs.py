"""The notice board: every hook, in the order of a run's life.

Rules for all of them. A hook takes only the arguments it needs, by name, and none has a default. Hooks build things; hot loops
call what hooks built. Names begin with `partita_`. "Everywhere" means the process that composes the config and every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from partita.plugin.markers import hookspec
from partita.plugin.types import Choices, ConfigContribution, Cost, Transform

if TYPE_CHECKING:
    from pathlib import Path

    from partita.plan.draft import PlanDraft
    from partita.plan.plan import Plan
    from partita.plan.problems import Problem

# ------------------------------------------------------------------ registration


@hookspec
def partita_config() -> ConfigContribution | None:
    """Config packages, schemas of config nodes and plan sections of this plug-in.

    Called everywhere, once, before composing; must not import torch. All results are used.
    """


@hookspec
def partita_slots() -> dict[str, Sequence[str]]:  # type: ignore[empty-body]
    """Names that `partita_provide` answers, by slot; for listings and for error messages.

    Called everywhere; must not import torch. All results are merged; two plug-ins with the same name in a slot are refused.
    """


# ------------------------------------------------------------------ decide


@hookspec
def partita_decide(draft: PlanDraft) -> None:
    """Write this plug-in's sections with `draft.write(section, value)`, from `draft.config`, `draft.model`, `draft.cluster` and
    earlier sections.

    Called in the process that plans (and in each rank under torchrun), without process group or device, owner by owner in the
    order of `partita.plan.plan.SECTIONS`. Say with `draft.effect(...)` where what is in effect differs from what was asked.
    """


@hookspec
def partita_choices(draft: PlanDraft) -> Choices | None:
    """All ways to fill in this plug-in's keys that are `auto`, for the planner to choose from; None where nothing is `auto`.

    Called where `partita_decide` is, before it. `draft` has config, model and cluster, no
    section yet. `partita_decide` is then called with a config in which the keys have values: for each of the ways while the planner
    compares them, and for the best ones once more. So it must be quick, and what it decides may depend on its own keys and on earlier
    sections only.
    """


@hookspec
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:  # type: ignore[empty-body]
    """Problems of the finished plan, each with config key, reason and remedy.

    Called where `partita_decide` is. All results are listed.
    """


@hookspec
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:  # type: ignore[empty-body]
    """Costs that this plug-in adds to the core's own estimate. Called where `partita_decide` is. All results are added."""


# ------------------------------------------------------------------ build


@hookspec
def partita_transforms(plan: Plan) -> list[Transform]:  # type: ignore[empty-body]
    """Named model transforms with their order. Called on every rank while building. All results are sorted together."""


@hookspec
def partita_architecture(config: Any) -> list[Transform]:  # type: ignore[empty-body]
    """Changes of what the model is, such as experts or adapters, by config alone. Called while planning and, on every rank, while
    building. Each `apply(model, config)` gets the model on meta as its builder made it, before `partita_transforms`; all are sorted together.
    """


@hookspec(firstresult=True)
def partita_provide(slot: str, name: str) -> Any:
    """An implementation for a named slot, or None when this plug-in has none of that name.

    Called on every rank while building (never in the loop), sometimes while planning. The first result that is not None wins.
    Slots and what they must return are listed in docs/hooks.md: model, corpus, tokenizer, optimizer, lr_schedule, loss,
    executor, collective, tier, tracker.
    """


# ------------------------------------------------------------------ observe


@hookspec
def partita_run_start(run: Any) -> None:
    """Everything is built, no step made.

    Called on every rank with the `partita.train.run.Run`. Observers read; what they raise ends the run. A function appended to
    `run.vetoes` is asked before each update, with step, loss and gradient norm: a text says why the update is left out.
    """


@hookspec
def partita_step_start(run: Any, step: int) -> None:
    """Before the first micro-batch of `step` (counted from 1). Called on every rank."""


@hookspec
def partita_gradients_ready(run: Any, step: int) -> None:
    """All gradients of `step` are reduced; the optimizer has not run. Called on every rank."""


@hookspec
def partita_step_end(run: Any, step: int, metrics: dict[str, Any]) -> None:
    """After the update of `step`. `metrics` is the line of metrics.jsonl. Called on every rank.

    `partita.errors.RollBack`, raised on all ranks alike, takes the run back to its newest checkpoint and on with other samples.
    """


@hookspec
def partita_evaluate(run: Any, step: int, metrics: dict[str, Any]) -> None:
    """After an evaluation at `step`. Called on every rank."""


@hookspec
def partita_save(run: Any, step: int, path: Path) -> None:
    """A checkpoint of `step` was started (it may still be written in the background). Called on every rank."""


@hookspec
def partita_load(run: Any, step: int, path: Path) -> None:
    """A checkpoint was loaded; training goes on after `step`. Called on every rank."""


@hookspec
def partita_run_end(run: Any, summary: dict[str, Any]) -> None:
    """The run is over, its last checkpoint complete. Called on every rank, also after an interruption."""


@hookspec
def partita_failure(run: Any, error: BaseException) -> None:
    """The run ends with an error. Called on the rank that raised it."""


# ------------------------------------------------------------------ export


@hookspec
def partita_export(config: dict[str, Any], weights: dict[str, Any]) -> Any:
    """Change whole weights, by name, in place before they are written for others: what a plug-in added to the model goes back into it.

    Called in the process that exports, with the run's plain config. A plug-in whose model has another form than its builder's returns
    translate(model, weights) -> (config.json, weights by their names), with the node `model`; others None. The first one wins.
    """
