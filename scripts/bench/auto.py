"""The planner's choice against all layouts that can be run, each measured: python scripts/bench/auto.py [--shapes N] [--limit N].

For each of five shapes of a GPT on 4 ranks every layout, batch and ZeRO stage that has no problems is run for a few steps, and the table
says how far the planner's choice is from the fastest. Calibrate first (scripts/calibrate.py launch.ranks=4), on an idle machine: it
takes about 6 seconds for each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.config.compose import compose_config, registry_for
from partita.plan.make import make_plan
from partita.plan.solve.describe import plan_words
from partita.train.trials import Trial, measure

# layers, width, heads, vocabulary, sequence: wide, deep, large vocabulary, long, small
SHAPES = [(4, 256, 8, 1024, 128), (12, 128, 4, 512, 128), (2, 192, 4, 8192, 128), (4, 128, 4, 512, 512), (2, 512, 8, 512, 64)]
COMMON = [
    "launch.ranks=4",
    "train.global_batch=16",
    "tracker=none",
    "data.tokenizer=ids",
    "data=synthetic",
    "launch.log_level=warning",
]
FREE = ["parallel.tensor=auto", "parallel.pipeline=auto", "zero=auto"]


def overrides(shape: tuple[int, ...]) -> list[str]:
    """The job of a shape."""
    layers, width, heads, vocab, sequence = shape
    sizes = [f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", f"model.vocab={vocab}"]
    return [*COMMON, *sizes, f"data.sequence={sequence}"]


def candidates(shape: tuple[int, ...]) -> list[list[str]]:
    """Settings of all runs: degrees x micro-batch x ZeRO stage."""
    found = []
    for pipeline, tensor in itertools.product((1, 2, 4), repeat=2):
        if 4 % (pipeline * tensor):
            continue
        data = 4 // (pipeline * tensor)
        for micro, stage in itertools.product((1, 2, 4, 8, 16), range(4) if data > 1 else (0,)):
            share = 16 // data
            if micro <= share and share // micro >= pipeline:
                found.append(
                    [
                        f"parallel.pipeline={pipeline}",
                        f"parallel.tensor={tensor}",
                        f"train.micro_batch={micro}",
                        f"zero.stage={stage}",
                    ]
                )
    return found


def run(written: list[str]) -> tuple[Trial, bool]:
    """One run, and whether it could be planned at all."""
    config, info = compose_config(written)
    registry = registry_for(tuple(config.plugins.block))
    with tempfile.TemporaryDirectory() as folder:
        trial = measure(config, {}, registry, replace(info, dir=Path(folder)))
    return trial, not trial.error


def chosen(shape: tuple[int, ...]) -> tuple[str, list[str]]:
    """The planner's choice in words, and as overrides."""
    config, _ = compose_config([*overrides(shape), *FREE])
    planned = make_plan(config, registry_for(tuple(config.plugins.block)))
    planned.raise_problems()
    assert planned.choice is not None
    settings = planned.choice.settings
    return plan_words(planned.plan), [f"{k}={'null' if v is None else v}" for k, v in settings.items()]


def bench(shape: tuple[int, ...], limit: int | None) -> dict[str, Any]:
    """The row of a shape."""
    words, settings = chosen(shape)
    mine = min((run([*overrides(shape), *settings])[0] for _ in range(2)), key=lambda t: t.seconds or float("inf"))
    if mine.seconds is None:
        raise SystemExit(f"the planner's choice does not run: {words}: {mine.error}")
    best, count, refused = mine, 0, 0
    for written in candidates(shape)[:limit]:
        trial, ran = run([*overrides(shape), *written])
        count, refused = count + ran, refused + (not ran)
        print(f"  {trial.words}: " + (f"{trial.seconds:.4f} s" if trial.seconds else trial.error[:100]), flush=True)
        if trial.seconds is not None and trial.seconds < (best.seconds or 0.0):
            best = trial
    off = mine.seconds / (best.seconds or mine.seconds) - 1
    return {
        "shape": shape,
        "choice": words,
        "seconds": mine.seconds,
        "best": best.words,
        "best_seconds": best.seconds,
        "off": off,
    } | {
        "measured": count,
        "refused": refused,
    }


def main() -> int:
    """Print the table; exit status 1 where a choice is more than 10 % off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--limit", type=int, default=None, help="runs of each shape at most")
    arguments = parser.parse_args()
    started, rows = time.perf_counter(), []
    for shape in SHAPES[: arguments.shapes]:
        print(f"layers, width, heads, vocabulary, sequence = {shape}", flush=True)
        rows.append(bench(shape, arguments.limit))
    for row in rows:
        print(json.dumps(row))
    print(
        f"\n{'shape':28} {'choice s':>9} {'best s':>9} {'off':>7}  choice | best   ({time.perf_counter() - started:.0f} s in all)"
    )
    for row in rows:
        print(
            f"{row['shape']!s:28} {row['seconds']:9.4f} {row['best_seconds']:9.4f} {row['off']:7.1%}  {row['choice']} | {row['best']}"
        )
    return int(any(row["off"] > 0.10 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
