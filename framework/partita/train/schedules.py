"""Learning-rate schedules: factors on `optimizer.lr` by update. Builders of the slot `lr_schedule`.

A schedule is a function of the number k of the update, from 1; updates that are skipped don't count. Warm-up over w updates gives
k / w, so the w-th update is the first at the full rate. From there to the last update the factor falls to `minimum`, which the
last update has exactly. No value is ever NaN or outside 0 to 1, whatever w and the number of updates; after the last it stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from partita.config.schema import LrScheduleConfig
from partita.errors import ConfigError
from partita.plan.problems import Problem, render

Factor = Callable[[int], float]


def check_schedule(config: LrScheduleConfig, steps: int) -> list[Problem]:
    """What is wrong with a schedule of `steps` updates; empty when it can be used. All built-in schedules share these rules."""
    problems = []
    if steps < 1:
        problems.append(Problem("train.steps", f"{steps} updates", "at least 1"))
    for name in ("warmup", "decay"):
        if reason := _bad_length(getattr(config, name)):
            problems.append(
                Problem(f"lr_schedule.{name}", reason, "a number of steps (5), or a share of train.steps below 1 (0.05)")
            )
    if not 0.0 <= config.minimum <= 1.0:  # also false for NaN
        problems.append(Problem("lr_schedule.minimum", f"{config.minimum} is no factor on the peak rate", "from 0 to 1"))
    return problems or _check_lengths(config, steps)


def _bad_length(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{value!r} is neither steps nor a share"
    if isinstance(value, float) and not 0.0 <= value < 1.0:
        return f"{value!r} is a float, which is read as a share of the run"
    return f"{value} steps" if value < 0 else None


def _check_lengths(config: LrScheduleConfig, steps: int) -> list[Problem]:
    warmup, decay = length(config.warmup, steps), length(config.decay, steps)
    if warmup > steps:
        reason = f"{warmup} steps are more than train.steps={steps}, so the peak rate would never be reached"
        return [Problem("lr_schedule.warmup", reason, f"at most {steps}, or a share of the run (0.05)")]
    if config.name == "wsd" and warmup + decay > steps:
        reason = f"a decay of {decay} steps and a warm-up of {warmup} don't fit into train.steps={steps}"
        return [Problem("lr_schedule.decay", reason, f"at most {steps - warmup}, or a share of the run")]
    return []


def length(value: int | float, steps: int) -> int:
    """Updates that `value` stands for: itself (int), or the nearest number to that share of `steps` (float)."""
    return value if isinstance(value, int) else round(value * steps)


def make_constant(config: LrScheduleConfig, steps: int) -> Factor:
    """1 after the warm-up."""
    warmup = _checked(config, steps)
    return lambda k: _rise(k, warmup)


def make_linear(config: LrScheduleConfig, steps: int) -> Factor:
    """A straight line from 1 to `minimum`."""
    return _falling(config, steps, lambda share: 1.0 - share)


def make_cosine(config: LrScheduleConfig, steps: int) -> Factor:
    """Half a cosine from 1 to `minimum` (Loshchilov and Hutter 2017, without restarts)."""
    return _falling(config, steps, lambda share: 0.5 * (1.0 + math.cos(math.pi * share)))


def make_wsd(config: LrScheduleConfig, steps: int) -> Factor:
    """1, then over the last `decay` updates a straight line to `minimum` (Hu et al. 2024; line: Hägele et al. 2024)."""
    warmup = _checked(config, steps)
    decay = length(config.decay, steps)
    start = steps - decay

    def factor(k: int) -> float:
        if k <= start or not decay:
            return _rise(k, warmup)
        return _blend(config.minimum, 1.0 - min((k - start) / decay, 1.0))

    return factor


def make_inverse_sqrt(config: LrScheduleConfig, steps: int) -> Factor:
    """sqrt(w / k) after a warm-up of w updates, at least one (Vaswani et al. 2017, section 5.3, scaled to a peak of 1)."""
    warmup = _checked(config, steps)
    peak = max(warmup, 1)
    return lambda k: _rise(k, warmup) if k <= peak else math.sqrt(peak / k)


SCHEDULES: dict[str, Callable[[LrScheduleConfig, int], Factor]] = {
    "constant": make_constant,
    "linear": make_linear,
    "cosine": make_cosine,
    "wsd": make_wsd,
    "inverse_sqrt": make_inverse_sqrt,
}


def _checked(config: LrScheduleConfig, steps: int) -> int:
    """The warm-up in updates. Raises ConfigError with all problems."""
    if problems := check_schedule(config, steps):
        raise ConfigError(render(problems))
    return length(config.warmup, steps)


def _rise(k: int, warmup: int) -> float:
    return min(k / warmup, 1.0) if warmup > 0 else 1.0


def _blend(minimum: float, shape: float) -> float:
    """`minimum` where shape is 0, exactly; 1 where it is 1."""
    return min(minimum + (1.0 - minimum) * shape, 1.0)


def _falling(config: LrScheduleConfig, steps: int, shape: Callable[[float], float]) -> Factor:
    """Warm-up, then `shape` of the share of the fall that is over: 0 at the peak, 1 at the last update."""
    warmup = _checked(config, steps)
    peak = max(warmup, 1)  # the first update at the full rate
    fall = steps - peak

    def factor(k: int) -> float:
        if k <= peak:
            return _rise(k, warmup)
        if fall <= 0 or k >= steps:
            return config.minimum if fall > 0 else 1.0
        return _blend(config.minimum, shape((k - peak) / fall))

    return factor
