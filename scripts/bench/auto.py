"""The planner's choice against all layouts that can be run, each measured; and published trainings against what a plan predicts.

python scripts/calibrate.py launch.ranks=4                  # first, on an idle machine
python scripts/bench/auto.py [--shapes N] [--minutes 15]    # exit status 1 where trials' choice is more than 10 % off, 3: time ran out
python scripts/bench/auto.py --published                    # exit status 1 where a prediction is off and nothing says why

For each of five shapes of a GPT on 4 ranks every layout, schedule, batch and ZeRO stage without problems is run for a few steps; those
that are much slower than the best so far are given up early. Two choices are held against them: the planner's own, from predictions alone,
and that of parallel.trials=N, which takes the fastest of its best N by a short run of each. The choices and the fastest few are then
measured again, in turn: what is first of hundreds in one measurement each owes some of that to noise. Figures are kept in a file (--file),
so that the same command goes on where it was stopped; --fresh forgets them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("plan", "parallel", "distributed")]

import timing  # type: ignore[import-not-found]  # noqa: E402
from pool import RankError, run_ranks  # type: ignore[import-not-found]  # noqa: E402
from published import STEPS, Published  # type: ignore[import-not-found]  # noqa: E402

from partita.config.compose import compose_config, registry_for  # noqa: E402
from partita.config.plain import to_plain  # noqa: E402
from partita.plan.estimate import speed  # noqa: E402
from partita.plan.make import Planned, make_plan  # noqa: E402
from partita.plan.solve.describe import plan_words  # noqa: E402
from partita.runtime.spec import RunSpec  # noqa: E402
from partita.train.trials import Trial, measured_choice  # noqa: E402

# layers, width, heads, vocabulary, sequence: wide, deep, large vocabulary, long, small
SHAPES = [(4, 256, 8, 1024, 128), (12, 128, 4, 512, 128), (2, 192, 4, 8192, 128), (4, 128, 4, 512, 512), (2, 512, 8, 512, 64)]
COMMON = [
    "launch.ranks=4",
    "train.global_batch=16",
    "tracker=none",
    "data.tokenizer=ids",
    "data=synthetic",
    "data.limit=20000",
    "train.sample=0",
]
FREE = ["parallel.tensor=auto", "parallel.pipeline=auto", "zero=auto"]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")
HOPELESS = 2.0  # times the best: given up after the warm-up
TRIALS = 8  # plans that the planner tries
FINAL, ROUNDS = 4, 5  # the fastest few, and how often they and the choices are measured again
LIMIT = 120.0  # seconds that a run may take


class OutOfTime(Exception):
    """The minutes are over; what was measured is in the file."""


@dataclass
class Figures:
    """Seconds of a step by shape and settings, kept in a file line by line. None: it can't be run."""

    path: Path
    end: float
    known: dict[str, float | None]

    def of(self, job: list[str], settings: list[str], best: float) -> float | None:
        """The figure, from the file or measured now."""
        key = " ".join([*job, *settings])
        if key not in self.known:
            if time.monotonic() > self.end:
                raise OutOfTime
            self.known[key] = seconds([*job, *settings], HOPELESS * best)
            with self.path.open("a") as file:
                file.write(json.dumps({"run": key, "seconds": self.known[key]}) + "\n")
        return self.known[key]


def planned(overrides: list[str], folder: str = "outputs/bench") -> tuple[Planned, Any]:
    """A plan, and the job."""
    config, job = compose_config([*overrides, f"run.dir={folder}"])
    return make_plan(config, registry_for(tuple(config.plugins.block))), job


def seconds(overrides: list[str], hopeless: float) -> float | None:
    """Seconds of a step; None for a plan with problems, or one that fails, which is told."""
    with tempfile.TemporaryDirectory(prefix="partita_auto_") as folder:
        plan, job = planned(overrides, folder)
        if plan.problems:
            return None
        spec = RunSpec(to_plain(plan.config), plan.plan, job, plan.plan.layout.world)
        try:
            return float(run_ranks(spec.ranks, timing.step_seconds, spec, hopeless, timeout=LIMIT)[0])
        except RankError as error:
            print(f"  FAILED: {plan_words(plan.plan)}: {str(error).splitlines()[0]}", flush=True)
            return None


def job_of(shape: tuple[int, ...]) -> list[str]:
    """What all runs of a shape share."""
    layers, width, heads, vocab, sequence = shape
    sizes = [f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", f"model.vocab={vocab}"]
    return [*COMMON, *sizes, f"data.sequence={sequence}"]


def candidates() -> list[list[str]]:
    """Settings of all runs: degrees x schedule x micro-batch x ZeRO stage."""
    found = []
    for pipeline, tensor in itertools.product((1, 2, 4), repeat=2):
        if 4 % (pipeline * tensor):
            continue
        data = 4 // (pipeline * tensor)
        share = 16 // data
        for micro, stage in itertools.product((1, 2, 4, 8, 16), range(4) if data > 1 else (0,)):
            if micro > share or share // micro < pipeline:
                continue
            written = [
                f"parallel.pipeline={pipeline}",
                f"parallel.tensor={tensor}",
                f"train.micro_batch={micro}",
                f"zero.stage={stage}",
            ]
            found += [[*written, f"parallel.schedule={name}"] for name in SCHEDULES] if pipeline > 1 else [written]
    return found


def chosen(shape: tuple[int, ...], figures: Figures) -> list[tuple[str, list[str]]]:
    """Two choices in words, and as overrides: by prediction, and by trials of the best few."""
    plan, info = planned([*job_of(shape), *FREE, f"parallel.trials={TRIALS}"])
    plan.raise_problems()
    assert plan.choice is not None

    def run(config: Any, settings: dict[str, Any], *_: Any) -> Trial:
        written = _overrides(settings)
        return Trial(settings, " ".join(written), figures.of(job_of(shape), written, float("inf")))

    tried = measured_choice(plan.config, plan.choice, registry_for(tuple(plan.config.plugins.block)), info, run)
    found = []
    for choice in (plan.choice, tried):
        settings = _overrides(choice.settings)
        found.append((plan_words(planned([*job_of(shape), *settings])[0].plan), settings))
    return found


def _overrides(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={'null' if value is None else value}" for key, value in settings.items()]


def bench(shape: tuple[int, ...], figures: Figures) -> dict[str, Any]:
    """The row of a shape."""
    job = job_of(shape)
    choices = chosen(shape, figures)
    ran: list[tuple[float, list[str]]] = []
    for settings in [*(settings for _, settings in choices), *candidates()]:
        took = figures.of(job, settings, min((r[0] for r in ran), default=float("inf")))
        if took is not None:
            ran.append((took, settings))
    known = [settings for _, settings in choices]
    others = [settings for _, settings in sorted(ran, key=lambda r: r[0]) if settings not in known]
    final = [*known, *others[:FINAL]]
    again: list[list[float]] = [[] for _ in final]
    for number in range(ROUNDS):
        for i, settings in enumerate(final):
            took = figures.of([*job, f"seed={number + 1}"], settings, float("inf"))
            again[i].append(took if took is not None else float("inf"))
    times = [statistics.median(values) for values in again]
    fastest = min(range(len(final)), key=times.__getitem__)
    return {
        "shape": shape,
        "predicted": choices[0][0],
        "predicted_seconds": times[0],
        "predicted_off": times[0] / times[fastest] - 1,
        "tried": choices[1][0],
        "tried_seconds": times[1],
        "tried_off": times[1] / times[fastest] - 1,
        "best": plan_words(planned([*job, *final[fastest]])[0].plan),
        "best_seconds": times[fastest],
        "measured": len(ran),
    }


def published() -> int:
    """The table of published steps; how many predictions are off without a reason."""
    bad = 0
    print(f"{'training':40} {'published s':>11} {'predicted s':>11} {'off':>7}  source, and what the model lacks")
    for row in STEPS:
        plan = planned(list(row.overrides))[0]
        found = speed(plan.draft, plan.plan, plan.costs)
        assert found is not None
        off = row.seconds / found.seconds - 1
        bad += not row.lacks and abs(off) > row.off
        print(f"{row.name:40} {row.seconds:11.2f} {found.seconds:11.2f} {off:+7.1%}  {_words(row)}", flush=True)
    return bad


def _words(row: Published) -> str:
    return row.source + (f"; lacks: {row.lacks}" if row.lacks else "")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", action="store_true", help="published trainings, in place of this machine")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--minutes", type=float, default=15.0, help="after which no new layout is measured")
    parser.add_argument("--file", type=Path, default=Path("outputs/bench_auto.jsonl"), help="where figures are kept")
    parser.add_argument("--fresh", action="store_true", help="forget the figures in the file")
    arguments = parser.parse_args()
    if arguments.published:
        return int(bool(published()))
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    if arguments.fresh:
        arguments.file.unlink(missing_ok=True)
    lines = arguments.file.read_text().splitlines() if arguments.file.exists() else []
    known = {entry["run"]: entry["seconds"] for entry in map(json.loads, lines)}
    figures = Figures(arguments.file, time.monotonic() + 60 * arguments.minutes, known)
    started, rows, late = time.perf_counter(), [], False
    for shape in SHAPES[: arguments.shapes]:
        try:
            rows.append(bench(shape, figures))
        except OutOfTime:
            late = True
            print(f"time is up at shape {shape}; the same command goes on", flush=True)
            break
        print(json.dumps(rows[-1]), flush=True)
    print(
        f"\n{'shape':28} {'predicted':>16} {'by trials':>16} {'best s':>8}  by trials | best   ({time.perf_counter() - started:.0f} s)"
    )
    for row in rows:
        cells = [f"{row[c + '_seconds']:7.3f} {row[c + '_off']:+8.1%}" for c in ("predicted", "tried")]
        print(f"{row['shape']!s:28} {cells[0]} {cells[1]} {row['best_seconds']:8.3f}  {row['tried']} | {row['best']}")
    return 1 if any(row["tried_off"] > 0.10 for row in rows) else 3 if late else 0


if __name__ == "__main__":
    sys.exit(main())
