"""What Partita costs over a plain torch loop that does the same work: one update, and the way from the command to the first one.

    python scripts/bench/overhead.py                       # updates on 1 rank and on 2 (DDP), then starts
    python scripts/bench/overhead.py --part updates --turns 20 model.width=384

Updates: both loops live in the same ranks and take turns (A B A B), so that a busy machine slows both; where their memory lies is a matter
of luck worth 5 %, so this is done in several starts, of which the one with the median ratio counts. Partita's side is the whole of its update (data,
schedule, metrics line, progress), the plain side gets its tokens for nothing. Other arguments are overrides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = Path(__file__).resolve().parent
MODEL = {"layers": 4, "width": 256, "heads": 8, "vocab": 2048}
BATCH, SEQUENCE = 8, 128
COMMON = (
    "data=synthetic", f"data.sequence={SEQUENCE}", f"train.global_batch={BATCH}", "tracker=none", "launch.threads=1",
    "train.eval_at_end=false", "train.save_at_end=false", "train.sample=0",
)  # fmt: skip


# ------------------------------------------------------------------ updates


def side_by_side(spec: Any) -> dict[str, Any]:
    """Body of a rank: turns of Partita's loop and of the plain one; returns medians and ratios (rank 0's clock)."""
    import torch.distributed as dist

    from partita.train import run as runs
    from partita.train.loop import StepClock, one_update
    from partita.train.progress import Progress

    sys.path.insert(0, str(BENCH))
    turns, length = (int(v) for v in os.environ["BENCH_TURNS"].split("x"))
    run = runs.open_run(spec)
    plain = _plain(run)
    updates, clock = run.data.iterate(1), StepClock()
    seconds: dict[str, list[float]] = {"partita": [], "plain": []}
    cpu: dict[str, list[float]] = {"partita": [], "plain": []}
    with Progress(10**9, 10**9, enabled=False) as progress:

        def ours() -> None:
            step, batches = next(updates)
            metrics, _ = one_update(run, step, batches, clock)
            run.step = step
            run.metrics.write(metrics)
            progress.step(metrics)

        def theirs() -> None:
            plain.update(run.step)

        for turn in range(turns + 1):
            for name, update in (("partita", ours), ("plain", theirs)):
                dist.barrier()
                for _ in range(length):
                    start, used = time.perf_counter(), time.process_time()
                    update()
                    if turn:  # the first turn warms up
                        seconds[name].append(time.perf_counter() - start)
                        cpu[name].append(time.process_time() - used)
    run.close()
    out: dict[str, Any] = {k: statistics.median(v) for k, v in seconds.items()}
    return out | {f"{k}_cpu": statistics.median(v) for k, v in cpu.items()}


def _plain(run: Any) -> Any:
    """The plain loop over a second model of the same shape and the same initial weights."""
    import torch
    from plain import PlainLoop, make_batches

    from partita.models.gpt import make_gpt

    model = make_gpt(run.config, run.config.model.vocab)
    with run.engine.full_parameters(), torch.no_grad():
        for mine, given in zip(model.parameters(), run.model.parameters(), strict=True):
            mine.copy_(given)
    batches = make_batches(
        run.rank, run.mesh.world, run.plan.schedule.global_batch, run.config.data.sequence, run.config.model.vocab
    )
    return PlainLoop(model, batches, run.plan.schedule.micro_batches)


def bench_job(config: Any, info: Any) -> dict[str, Any]:
    """A Hydra job that runs `side_by_side` in place of the training loop, and writes its figures."""
    from partita.config.compose import registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.launch import launch
    from partita.runtime.spec import RunSpec

    registry = registry_for(tuple(config.plugins.block))
    planned = make_plan(config, registry)
    planned.raise_problems()
    ranks = planned.plan.layout.world
    spec = RunSpec(config=to_plain(config), plan=planned.plan, job=info, ranks=ranks, blocked=registry.blocked)
    figures = launch(side_by_side, spec, ranks)
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps(figures))
    return {"status": "done"}


def median_start(ranks: int, options: argparse.Namespace, overrides: list[str]) -> dict[str, float]:
    """The one of several starts that has the median ratio."""
    found = [measure_updates(ranks, options.turns, options.length, overrides) for _ in range(options.starts)]
    ratios = sorted(f["partita"] / f["plain"] for f in found)
    print(
        f"{ranks} rank{'s' * (ranks > 1)}: wall ratios of {len(found)} starts: {' '.join(f'{r:.3f}' for r in ratios)}", flush=True
    )
    return sorted(found, key=lambda f: f["partita"] / f["plain"])[len(found) // 2]


def measure_updates(ranks: int, turns: int, length: int, overrides: list[str]) -> dict[str, float]:
    """Medians of one update in seconds for both sides."""
    with tempfile.TemporaryDirectory(prefix="partita_bench_") as folder:
        out = Path(folder) / "figures.json"
        env = {**os.environ, "BENCH_TURNS": f"{turns}x{length}", "BENCH_OUT": str(out), "BENCH_JOB": "1"}
        model = [f"model.{k}={v}" for k, v in MODEL.items()]
        line = [f"run.dir={folder}/run", f"launch.ranks={ranks}", "train.steps=1000000", *COMMON, *model, *overrides]
        subprocess.run([sys.executable, __file__, *line], env=env, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


# ------------------------------------------------------------------ starts


def first_of_partita(ranks: int, folder: Path, *flags: str) -> tuple[float, str]:
    """Seconds from the command to the first line of metrics, and what Python wrote to stderr."""
    small = ["model.layers=4", "model.width=256", "model.heads=8", "model.vocab=259", "train.global_batch=16"]
    line = [
        *flags,
        str(ROOT / "scripts" / "train.py"),
        f"run.dir={folder}",
        f"launch.ranks={ranks}",
        *COMMON,
        *small,
        "train.steps=1",
    ]
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads while it fills would stop the run
        start = time.time()
        process = subprocess.Popen([sys.executable, *line], stdout=subprocess.DEVNULL, stderr=log)
        metrics = folder / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.005)
        seconds = time.time() - start
        process.wait()
        log.seek(0)
        errors = log.read()
    if process.returncode:
        raise SystemExit(f"the run failed:\n{errors[-2000:]}")
    return seconds, errors


def first_of_plain(ranks: int, *flags: str) -> tuple[float, str]:
    """The same of `plain.py`, under torchrun where there are several ranks."""
    script = [str(BENCH / "plain.py"), "first"]
    runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    env = {**os.environ, "BENCH_BORN": str(time.time()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *flags, *runner, *script], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split("FIRST")[1].split()[0]), done.stderr


def import_seconds(errors: str) -> float:
    """Sum of the self times that `-X importtime` reports."""
    rows = [
        line.split("|")[0].split(":")[1] for line in errors.splitlines() if line.startswith("import time:") and "[us]" not in line
    ]
    return sum(int(r) for r in rows) / 1e6


def measure_starts(ranks: int, repeats: int) -> dict[str, float]:
    """Medians of the seconds to the first update, taken in turn."""
    seconds: dict[str, list[float]] = {"partita": [], "plain": []}
    with tempfile.TemporaryDirectory(prefix="partita_bench_") as folder:
        for i in range(repeats):
            seconds["plain"].append(first_of_plain(ranks)[0])
            seconds["partita"].append(first_of_partita(ranks, Path(folder) / f"start{ranks}_{i}")[0])
        return {k: statistics.median(v) for k, v in seconds.items()}


def measure_imports(repeats: int) -> dict[str, float]:
    """Medians of the seconds of all imports up to the end of a run of one rank."""
    seconds: dict[str, list[float]] = {"partita": [], "plain": []}
    with tempfile.TemporaryDirectory(prefix="partita_bench_") as folder:
        for i in range(repeats):
            seconds["plain"].append(import_seconds(first_of_plain(1, "-X", "importtime")[1]))
            seconds["partita"].append(import_seconds(first_of_partita(1, Path(folder) / f"imports{i}", "-X", "importtime")[1]))
        return {k: statistics.median(v) for k, v in seconds.items()}


# ------------------------------------------------------------------ table


def main() -> None:
    """Measure what is asked for and print one table; `--json FILE` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("updates", "starts", "all"), default="all")
    parser.add_argument("--turns", type=int, default=40, help="turns of each side")
    parser.add_argument("--length", type=int, default=1, help="updates in a turn")
    parser.add_argument("--starts", type=int, default=9, help="starts of the ranks for the figures of updates")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side for the figures of starts")
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    rows: list[tuple[str, float, float]] = []
    if options.part != "starts":
        for ranks in (1, 2):
            got = median_start(ranks, options, overrides)
            rows.append((f"update, {ranks} rank{'s' * (ranks > 1)}, wall", got["partita"], got["plain"]))
            rows.append((f"update, {ranks} rank{'s' * (ranks > 1)}, CPU", got["partita_cpu"], got["plain_cpu"]))
    if options.part != "updates":
        for ranks in (1, 2):
            got = measure_starts(ranks, options.repeats)
            rows.append((f"to the first update, {ranks} rank{'s' * (ranks > 1)}", got["partita"], got["plain"]))
        got = measure_imports(options.repeats)
        rows.append(("  of which imports (1 rank)", got["partita"], got["plain"]))
    print(f"{'seconds (medians)':32} {'partita':>9} {'plain':>9} {'ratio':>7}")
    for name, ours, theirs in rows:
        print(f"{name:32} {ours:9.4f} {theirs:9.4f} {ours / theirs:7.3f}")
    if options.json:
        options.json.write_text(json.dumps([{"what": n, "partita": a, "plain": b, "ratio": a / b} for n, a, b in rows]))


if __name__ == "__main__":
    if os.environ.get("BENCH_JOB"):
        from partita.cli import hydra_main

        sys.exit(hydra_main(bench_job, app="train"))
    main()
