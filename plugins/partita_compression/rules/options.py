"""Reading `optimizer.options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partita.config.messages import refusal
from partita.plan.problems import Problem


def numbers(config: Any, defaults: Mapping[str, float | None]) -> dict[str, Any]:
    """The options with defaults; the check of the plan finds strangers. Raises ConfigError for what is no number of at least 0."""
    problems = []
    for key in defaults:
        value = config.options.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            problems.append(Problem(f"optimizer.options.{key}", f"{value!r} is no number of at least 0.", "Give one."))
    if problems:
        raise refusal(problems)
    return {**defaults, **{k: v for k, v in config.options.items() if k in defaults and v is not None}}


def updates(key: str, value: float, steps: float | None) -> int:
    """A number of updates: itself, or a share below 1 of the updates of the run, `optimizer.options.steps`. Raises ConfigError."""
    if value == int(value):
        return int(value)
    if value > 1 or steps is None:
        reason = f"{value} is no number of updates, and a share needs optimizer.options.steps."
        raise refusal(
            [Problem(f"optimizer.options.{key}", reason, "Use an integer, or a share below 1 and steps=${train.steps}.")]
        )
    return round(value * steps)
