"""Schedules that count as DeepSpeed's do, for configs that come from there; options are told by `lr_schedule.options`.

An update k (from 1) uses what the scheduler had reached after k - 1 updates: the first one has the starting rate. Factors are on
`optimizer.lr`. Edges have an answer: a warm-up of 0 updates begins at the peak, and one that is longer than the run never ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from partita.config.messages import refusal
from partita.errors import did_you_mean
from partita.plan.problems import Problem
from partita.train.schedules import length

Factor = Callable[[int], float]
WARMUP: dict[str, Any] = {"start": 0.0, "shape": "log", "total": None, "end": 0.0}
CYCLE: dict[str, Any] = {
    "low": 0.0,
    "first": 2000,
    "second": None,
    "first_stairs": 0,
    "second_stairs": None,
    "decay_rate": 0.0,
    "decay_steps": 0,
}
RANGE: dict[str, Any] = {"interval": 2000, "rate": 1.0, "staircase": False}


def _options(config: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """The options with defaults. Raises ConfigError for a stranger and for what is no number."""
    problems = []
    for key, value in config.options.items():
        path = f"lr_schedule.options.{key}"
        if key not in known:
            problems.append(Problem(path, f"{config.name} has no such option", did_you_mean(key, known)))
        elif key == "shape" and value not in ("log", "linear"):
            problems.append(Problem(path, f"{value!r} is no shape of a warm-up", "log or linear"))
        elif key not in ("shape", "staircase") and value is not None and not _is_number(value):
            problems.append(Problem(path, f"{value!r} is no number of at least 0", "give one"))
    if problems:
        raise refusal(problems)
    return {**known, **config.options}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _risen(done: int, warmup: int, shape: str) -> float | None:
    """Share of the way from `start` to the peak after `done` updates of the scheduler; None behind the warm-up."""
    if warmup == 0 or done >= warmup:
        return None
    if done < 0:
        return 0.0
    return math.log(done + 1) / math.log(warmup) if shape == "log" else done / warmup


def _warmed(config: Any, steps: int, after: Callable[[int, int, int, Mapping[str, Any]], float]) -> Factor:
    options = _options(config, WARMUP)
    total = options["total"] or steps
    warmup = length(config.warmup, steps)
    warmup = max(2, warmup) if warmup > 0 else 0  # the logarithm of 1 would divide by zero

    def factor(k: int) -> float:
        share = _risen(k - 2, warmup, options["shape"])
        if share is not None:
            return float(options["start"] + (1.0 - options["start"]) * share)
        return after(max(k - 2, 0), warmup, total, options)

    return factor


def make_warmup(config: Any, steps: int) -> Factor:
    """From `start` to 1 within `lr_schedule.warmup` updates (shape log or linear), then 1."""
    return _warmed(config, steps, lambda done, warmup, total, options: 1.0)


def make_warmup_decay(config: Any, steps: int) -> Factor:
    """The same, then a straight line to `start` at update `total` (default: the last one)."""

    def after(done: int, warmup: int, total: int, options: Mapping[str, Any]) -> float:
        left = max(0.0, (total - done) / max(1.0, total - warmup))
        return float(options["start"] + (1.0 - options["start"]) * min(left, 1.0))

    return _warmed(config, steps, after)


def make_warmup_cosine(config: Any, steps: int) -> Factor:
    """The same, then half a cosine to `end`."""

    def after(done: int, warmup: int, total: int, options: Mapping[str, Any]) -> float:
        progress = min(1.0, (done - warmup + 1) / max(1, total - warmup))
        return float(options["end"] + (1.0 - options["end"]) * (1.0 + math.cos(math.pi * progress)) / 2)

    return _warmed(config, steps, after)


def make_one_cycle(config: Any, steps: int) -> Factor:
    """From `low` to 1 in `first` updates and back in `second`, then decay (Smith 2018); the momentum stays as it is."""
    o = _options(config, CYCLE)
    first = max(float(o["first"]), 1.0)
    second = max(float(o["second"] if o["second"] is not None else first), 1.0)
    stairs = (o["first_stairs"], o["first_stairs"] if o["second_stairs"] is None else o["second_stairs"])

    def factor(k: int) -> float:
        done = k - 1
        if done > first + second and o["decay_steps"] and o["decay_rate"]:
            return float(o["low"] / (1.0 + o["decay_rate"] * (done - first - second) / o["decay_steps"]))
        if done > first + second:
            return float(o["low"])
        height, count = (done / first, stairs[0]) if done <= first else ((first + second - done) / second, stairs[1])
        if count:
            height = math.floor(height * count + 1e-9) / count
        return float(o["low"] + (1.0 - o["low"]) * height)

    return factor


def make_range_test(config: Any, steps: int) -> Factor:
    """1 + `rate` x updates / `interval`, in steps or not: to find the largest rate (Smith 2015)."""
    o = _options(config, RANGE)

    def factor(k: int) -> float:
        passed = (k - 1) / max(o["interval"], 1)
        return float(1.0 + o["rate"] * (math.floor(passed) if o["staircase"] else passed))

    return factor
