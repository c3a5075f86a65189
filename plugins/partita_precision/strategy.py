"""Decides section `precision`."""

from __future__ import annotations

from typing import Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import LossScale, Plan, Precision
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_precision.config import LossScaleConfig, PrecisionConfig

# Rows by name. Weights, moments and sums over micro-batches stay in float32: bfloat16 sums of ones stop growing at 256.
ROWS: dict[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(compute="bfloat16", reduce="bfloat16"),
    "fp16": Precision(compute="float16", reduce="float32"),
}
DTYPES = ("float32", "bfloat16", "float16")
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FIELDS = ("compute", "gradient", "reduce", "master", "optimizer")


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `precision`, section `precision`."""
    return ConfigContribution(nodes={"precision": PrecisionConfig}, sections=("precision",))


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """A row of the table, with overrides."""
    config = draft.config.precision
    if config.name not in ROWS:
        draft.problem(
            Problem("precision.name", f"{config.name!r} is no precision.", did_you_mean(config.name, ROWS).capitalize())
        )
    row = ROWS.get(config.name, Precision())
    dtypes = {field: _dtype(draft, field, getattr(config, field), getattr(row, field)) for field in FIELDS}
    draft.write("precision", Precision(**dtypes, loss_scale=_loss_scale(config.loss_scale, dtypes["compute"])))


def _dtype(draft: PlanDraft, field: str, asked: str | None, row: str) -> str:
    """The dtype in effect for one field; a word that is no dtype is a problem, and the row's goes on."""
    if asked is None:
        return row
    name = ALIASES.get(asked, asked)
    if name in DTYPES:
        return name
    draft.problem(Problem(f"precision.{field}", f"{asked!r} is no dtype to train in.", did_you_mean(asked, DTYPES).capitalize()))
    return row


def _loss_scale(config: LossScaleConfig, compute: str) -> LossScale | None:
    enabled = compute == "float16" if config.enabled is None else config.enabled
    if not enabled:
        return None
    return LossScale(config.initial, config.factor, config.interval, config.hysteresis, config.minimum, config.dynamic)


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Ranges of the loss scale, and dtypes that can't hold what they are asked to."""
    problems = _scale_problems(draft.config.precision.loss_scale)
    if plan.precision.compute == "float16" and plan.precision.loss_scale is None:
        reason = "float16 gradients below 6e-8 vanish without a loss scale (precision.compute=float16)."
        problems.append(
            Problem("precision.loss_scale.enabled", reason, "Drop precision.loss_scale.enabled=false, or use precision=bf16.")
        )
    if plan.precision.master == "float16":
        reason = "float16 weights lose updates smaller than 1/2048 of them."
        problems.append(
            Problem(
                "precision.master", reason, "Use precision.master=float32 (or bfloat16 with a rule that rounds stochastically)."
            )
        )
    return problems


def _scale_problems(config: LossScaleConfig) -> list[Problem]:
    rules: list[tuple[str, bool, str]] = [
        ("initial", config.initial >= config.minimum, f"initial must not be below minimum ({config.minimum:g})"),
        ("factor", config.factor > 1, "factor must be above 1"),
        ("interval", config.interval >= 1, "interval must be at least 1 step"),
        ("hysteresis", config.hysteresis >= 1, "hysteresis must be at least 1 overflow"),
        ("minimum", config.minimum > 0, "minimum must be above 0"),
    ]
    return [_range_problem(config, name, rule) for name, fine, rule in rules if not fine]


def _range_problem(config: Any, name: str, rule: str) -> Problem:
    default = getattr(LossScaleConfig(), name)
    return Problem(
        f"precision.loss_scale.{name}", f"{rule}, but it is {getattr(config, name)!r}.", f"The default is {default!r}."
    )
