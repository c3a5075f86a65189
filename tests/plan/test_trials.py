"""Trials: what is measured decides."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from partita.errors import PartitaError
from partita.plan.solve.choose import Choice
from partita.train.trials import TIMED, WARM, Trial, measured_choice, median_step


def ranked(*names):
    return [SimpleNamespace(option=SimpleNamespace(settings={"zero.stage": n}), seconds=1.0 + i) for i, n in enumerate(names)]


def run_of(seconds):
    def run(config, settings, registry, info):
        got = seconds[settings["zero.stage"]]
        return Trial(settings, f"stage {settings['zero.stage']}", got, "" if got else "out of memory")

    return run


def test_the_fastest_by_measurement_is_taken_and_failures_are_told():
    choice = Choice({"zero.stage": 0}, "planner", ranked=ranked(0, 1, 3))
    taken = measured_choice(None, choice, None, None, run_of({0: 0.5, 1: 0.2, 3: None}))
    assert taken.settings == {"zero.stage": 1} and "measured: 0.2 s" in taken.reason
    assert [r.verdict.split(";")[0] for r in taken.rows] == ["measured, taken", "measured", "failed: out of memory"]


def test_where_nothing_runs_the_prediction_stays():
    choice = Choice({"zero.stage": 0}, "planner", ranked=ranked(0, 1))
    taken = measured_choice(None, choice, None, None, run_of({0: None, 1: None}))
    assert taken.settings == {"zero.stage": 0} and "all 2 trials failed" in taken.reason


def test_warm_up_does_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": i, "loss": 1.0, "seconds": 9.0 if i <= WARM else 0.1 * i} for i in range(1, WARM + TIMED + 1)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert median_step(path) == pytest.approx(0.1 * (WARM + (TIMED + 1) // 2))
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(PartitaError, match="no step"):
        median_step(path)
