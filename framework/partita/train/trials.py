"""Short runs of the plans that the planner likes best: what is measured decides, where the user asked for it."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.config.job import JobInfo
from partita.config.plain import to_plain
from partita.errors import PartitaError, RunInterrupted
from partita.plan.make import make_plan
from partita.plan.solve.choose import Choice, Row
from partita.plan.solve.describe import plan_words
from partita.plan.solve.options import with_settings
from partita.runtime.launch import launch
from partita.runtime.scratch import scratch_folder
from partita.runtime.spec import RunSpec
from partita.train.run import worker

log = logging.getLogger("partita")
WARM, TIMED = 3, 5  # steps before the clock runs, and steps that count
# What a trial leaves out: it ends after its steps, and nobody hears of it.
SHORT: dict[str, Any] = {
    "train.steps": WARM + TIMED,
    "train.eval_every": 0,
    "train.eval_at_end": False,
    "train.save_every": 0,
    "train.save_at_end": False,
    "train.sample": 0,
    "train.resume": "never",
    "train.log_every": WARM + TIMED,
}


@dataclass(frozen=True)
class Trial:
    """Median seconds of a step, or why there are none."""

    settings: dict[str, Any]
    words: str
    seconds: float | None
    error: str = ""


def measure(config: Any, settings: dict[str, Any], registry: Any, info: JobInfo) -> Trial:
    """Run a plan for a few steps through the launcher of every run. A run that fails is no error here: its plan is out."""
    short = with_settings(config, {**settings, **SHORT, **({"tracker.name": "none"} if hasattr(config, "tracker") else {})})
    planned = make_plan(short, registry)
    words = plan_words(planned.plan)
    if planned.problems:
        return Trial(settings, words, None, f"{planned.problems[0].key}: {planned.problems[0].reason}")
    with scratch_folder("trial") as folder:
        job = replace(info, dir=folder)
        ranks = planned.plan.layout.world
        try:
            launch(worker, RunSpec(to_plain(planned.config), planned.plan, job, ranks, registry.blocked), ranks)
            return Trial(settings, words, median_step(folder / "metrics.jsonl"))
        except RunInterrupted:
            raise
        except PartitaError as error:
            return Trial(settings, words, None, str(error).splitlines()[0])


def median_step(metrics: Path) -> float:
    """Median of the seconds of the steps after the warm-up. Raises PartitaError where a run has written too few."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    seconds = [line["seconds"] for line in lines if "loss" in line and "seconds" in line][WARM:]
    if not seconds:
        raise PartitaError(f"a trial wrote no step after its first {WARM}")
    return statistics.median(seconds)


def measured_choice(config: Any, choice: Choice, registry: Any, info: JobInfo, run: Callable[..., Trial] = measure) -> Choice:
    """The choice with the fastest of its ranked plans, by measurement. Where none of them runs, the planner's own stays.

    run: measures one plan (another one in tests).
    """
    trials = []
    for number, candidate in enumerate(choice.ranked, 1):
        trial = run(config, dict(candidate.option.settings), registry, info)
        told = f"{trial.seconds:.3g} s a step" if trial.seconds is not None else f"failed: {trial.error}"
        log.info("trial %d of %d: %s: %s, predicted %.3g s", number, len(choice.ranked), trial.words, told, candidate.seconds)
        trials.append((candidate, trial))
    ran = [(c, t) for c, t in trials if t.seconds is not None]
    if not ran:
        return replace(choice, reason=f"{choice.reason}; all {len(trials)} trials failed, the first: {trials[0][1].error}")
    best, fastest = min(ran, key=lambda pair: pair[1].seconds or 0.0)
    rows = [Row(fastest.words, fastest.seconds or 0.0, f"measured, taken; {best.seconds:.3g} s predicted")]
    for candidate, trial in sorted(trials, key=lambda pair: pair[1].seconds or float("inf")):
        if candidate is not best:
            told = f"measured; {candidate.seconds:.3g} s predicted" if trial.seconds is not None else f"failed: {trial.error}"
            rows.append(Row(trial.words, trial.seconds or 0.0, told))
    reason = f"measured: {fastest.seconds:.3g} s a step, the fastest of {len(ran)} plans that were tried"
    return replace(choice, settings=dict(best.option.settings), reason=reason, rows=rows)
