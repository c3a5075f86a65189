"""Does compression change what is learned? The default run, shortened, by each method and three seeds, against uncompressed training.

python scripts/bench/convergence.py                        # goes on where it was stopped; the table of docs/strategies/compression.md
python scripts/bench/convergence.py --only onebit,topk     # some methods; names are those of METHODS
python scripts/bench/convergence.py --steps 60 --seeds 1   # a glance

A method is compared with the rule that it stands for, in the same layout and with the same clipping. Loss: mean of the last tenth of the
updates; data are the same for all methods, so differences are those of the methods.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "tests" / "distributed"), str(ROOT / "scripts" / "bench")]


class Method(NamedTuple):
    """overrides: beside the base's. base: the method that it is compared with."""

    overrides: tuple[str, ...]
    base: str = "uncompressed"


PAIR, FOUR = ("parallel.data=2",), ("parallel.replicate=2", "parallel.shard=2", "compression.node_ranks=2")
METHODS: dict[str, Method] = {
    "uncompressed": Method(PAIR),
    "bf16": Method((*PAIR, "compression=bf16", "zero.stage=3")),
    "int8": Method((*PAIR, "compression=int8")),
    "fp8": Method((*PAIR, "compression=int8", "compression.gradient_reduce=fp8")),
    "int4": Method((*PAIR, "compression=int8", "compression.gradient_reduce=int4")),
    "int4 with feedback": Method((*PAIR, "compression=int8", "compression.gradient_reduce=int4", "compression.error_feedback=true")),
    "int8 weights": Method((*PAIR, "zero.stage=3", "compression.parameter_gather=int8")),
    "zeropp": Method((*FOUR, "+strategy=zeropp")),
    "onebit": Method((*PAIR, "compression=onebit")),
    "topk": Method((*PAIR, "compression=topk")),
    "powersgd": Method((*PAIR, "compression=powersgd")),
    "zero_one_adam": Method((*PAIR, "optimizer=zero_one_adam")),
    "onebit_adam": Method((*PAIR, "+strategy=onebit_adam")),
    "onebit_adam, stage 3": Method((*PAIR, "+strategy=onebit_adam", "zero.stage=3")),
    "lamb": Method((*PAIR, "optimizer=lamb", "optimizer.lr=0.01")),
    "onebit_lamb": Method((*PAIR, "+strategy=onebit_lamb", "optimizer.lr=0.01"), "lamb"),
}  # fmt: skip
SHORT = ("model.layers=2", "model.width=128", "model.heads=4", "data.sequence=64", "data.limit=1048576", "tracker=none")


def play(rank: int, world: int, spec: Any, steps: int) -> list[float]:
    """On a rank: open the run and train; losses."""
    from partita.train.loop import StepClock, one_update
    from partita.train.run import open_run

    run = open_run(spec)
    try:
        return [one_update(run, step, run.data.step(step), StepClock())[0]["loss"] for step in range(1, steps + 1)]
    finally:
        for part in (run.data, run.checkpoints, run.metrics):
            part.close()


def losses(method: Method, seed: int, steps: int) -> list[float]:
    """Of one training. Raises ConfigError where the plan has problems."""
    import convergence  # type: ignore[import-not-found]
    from pool import run_ranks  # type: ignore[import-not-found]

    from partita.config.compose import compose_config, registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.spec import RunSpec

    config, job = compose_config([*SHORT, f"train.steps={steps}", f"seed={seed}", "train.resume=never", *method.overrides])
    registry = registry_for(())
    planned = make_plan(config, registry)
    planned.raise_problems()
    plan = planned.plan
    with tempfile.TemporaryDirectory(prefix="partita_convergence_") as folder:
        spec = RunSpec(to_plain(config), plan, replace(job, dir=Path(folder)), plan.layout.world, registry.blocked)
        found: list[float] = run_ranks(spec.ranks, convergence.play, spec, steps, timeout=1800)[0]
    return found


def table(results: dict[str, dict[str, float]], seeds: int) -> str:
    """Of methods that have all seeds, as Markdown."""
    rows = ["| method | final loss | spread over seeds | difference | against |", "|---|---|---|---|---|"]
    for name, method in METHODS.items():
        own, base = results.get(name, {}), results.get(method.base, {})
        wanted = [str(seed) for seed in range(seeds)]
        if not all(seed in own and seed in base for seed in wanted):
            continue
        ends = [own[seed] for seed in wanted]
        off = statistics.mean(own[seed] / base[seed] - 1 for seed in wanted)
        against = f"{off:+.2%} | {method.base}" if name != method.base else "| "
        spread = f"{(max(ends) - min(ends)) / statistics.mean(ends):.1%}"
        rows.append(f"| {name} | {statistics.mean(ends):.4f} | {spread} | {against} |")
    return "\n".join(rows)


def main() -> None:
    """Train what is missing in the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(METHODS), help="methods, by comma")
    parser.add_argument("--out", type=Path, default=Path("outputs/convergence.json"), help="what has been found so far")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    results = found.setdefault(str(options.steps), {})
    chosen = [name for name in METHODS if name in options.only.split(",")]
    for seed in range(options.seeds):
        for name in dict.fromkeys([*(METHODS[n].base for n in chosen), *chosen]):
            if str(seed) in results.setdefault(name, {}):
                continue
            curve = losses(METHODS[name], seed, options.steps)
            tail = curve[-max(1, options.steps // 10) :]
            results[name][str(seed)] = sum(tail) / len(tail)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1))
            print(f"{name}, seed {seed}: {results[name][str(seed)]:.4f}", flush=True)
    print(table(results, options.seeds))


if __name__ == "__main__":
    main()
