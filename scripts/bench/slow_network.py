"""What hierarchical int8 collectives save where the network between nodes is slow: two emulated nodes, two ranks in each.

    python scripts/bench/slow_network.py                    # 20 M parameters, stages 1, 2 and 3; then a model with BERT-Large's blocks
    python scripts/bench/slow_network.py --part stages --stages 2

Needs Linux and the right to make network namespaces. For each stage the rate is searched at which the flat float32 step takes as many
times the step on an unlimited network as is asked for (4: communication is three quarters of it); both ways are then measured at
that rate. `exposed` is the share of the step in which ranks stood waiting for messages, mean over ranks.
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

COMMON = (
    "data=synthetic", "tracker=none", "launch.threads=1", "train.steps=100000", "train.eval_at_end=false", "train.save_at_end=false",
    "train.sample=0", "train.communication_log=true", "parallel.data=4",
)  # fmt: skip
SMALL = (
    "model.layers=6", "model.width=512", "model.heads=8", "model.vocab=1024", "data.sequence=128", "train.global_batch=4",
)  # fmt: skip
# BERT-Large's blocks (width 1024, 16 heads, 512 tokens in a sequence), 3 of its 24, and a small vocabulary: arithmetic and bytes of a
# block keep their ratio, and two cores are done with a step in seconds
BERT = (
    "model=bert", "model.layers=3", "model.width=1024", "model.heads=16", "model.vocab=2048", "data.sequence=128",
    "train.global_batch=4",
)  # fmt: skip
INT8 = ("compression.gradient_reduce=int8", "compression.parameter_gather=int8", "compression.algorithm=hierarchical")
TURNS = 3  # steps of each measurement; the median counts


# ------------------------------------------------------------------ one rank


class Runs:
    """Runs on this rank, and the rate of this node's link."""

    def __init__(self, folder: Path) -> None:
        import torch.distributed as dist

        self._dist, self._folder, self._count = dist, folder, 0

    def open(self, *overrides: str) -> Any:
        """A run, and a function that makes one update."""
        from partita.config.compose import compose_config, registry_for
        from partita.config.plain import to_plain
        from partita.plan.make import make_plan
        from partita.runtime.spec import RunSpec
        from partita.train.loop import StepClock, one_update
        from partita.train.run import open_run

        self._count += 1
        config, info = compose_config([*COMMON, *overrides, f"run.dir={self._folder}/{self._count}"])
        planned = make_plan(config, registry_for(()))
        planned.raise_problems()
        spec = RunSpec(to_plain(config), planned.plan, info, planned.plan.layout.world)
        run = open_run(spec)
        batches, clock = run.data.iterate(1), StepClock()

        def update() -> None:
            step, mine = next(batches)
            one_update(run, step, mine, clock)
            run.step = step

        return run, update

    def measure(self, run: Any, update: Any, turns: int = TURNS) -> tuple[float, float, float]:
        """Medians: (seconds of an update, exposed seconds; bytes that a node sent in it)."""
        import torch

        rows = []
        for _ in range(turns):
            sent = carried()
            self._dist.barrier()
            run.communication.exposed.clear()
            start = time.perf_counter()
            update()
            rows.append((time.perf_counter() - start, run.communication.exposed[-1], carried() - sent))
        values = torch.tensor([statistics.median(column) for column in zip(*rows, strict=True)], dtype=torch.float64)
        self._dist.all_reduce(values)
        seconds, exposed, sent = (values / self._dist.get_world_size()).tolist()
        return seconds, exposed, sent

    def rate(self, rate: float | None) -> None:
        """Set what each node may send, bytes/s."""
        from partita.runtime.emulation import rate_command

        self._dist.barrier()
        if os.environ["LOCAL_RANK"] == "0":
            subprocess.run(rate_command(rate), check=True)
        self._dist.barrier()

    def close(self, run: Any) -> None:
        """End a run."""
        run.close()


def carried() -> int:
    """Bytes that this node has sent."""
    from partita.runtime.emulation import LINK

    line = next(row for row in Path("/proc/net/dev").read_text().splitlines() if LINK in row)
    return int(line.split(":")[1].split()[8])


def compare(runs: Runs, name: str, times: float, overrides: tuple[str, ...], rate: float | None) -> dict[str, Any]:
    """Flat float32 and hierarchical int8 at one rate: the one at which the flat step takes `times` the unlimited one, or the one given."""
    runs.rate(None)
    run, update = runs.open(*overrides)
    update()
    free, _, sent = runs.measure(run, update)
    wanted = rate or sent / ((times - 1) * free)
    for search in range(1 if rate else 4):
        runs.rate(wanted)
        update()
        flat, exposed, sent = runs.measure(run, update, TURNS if search or rate else 1)
        if rate or abs(flat / free / times - 1) < 0.06:
            break
        wanted *= min(4.0, max(0.25, (flat - free) / ((times - 1) * free)))
    out = {
        "name": name, "rate": wanted, "free": free, "flat": flat, "flat_exposed": exposed / flat, "flat_bytes": sent,
    }  # fmt: skip
    runs.close(run)
    runs.rate(None)
    run, update = runs.open(*overrides, *INT8)
    update()
    runs.rate(wanted)
    update()
    seconds, exposed, sent = runs.measure(run, update)
    runs.close(run)
    return out | {"int8": seconds, "int8_exposed": exposed / seconds, "int8_bytes": sent}


def rank_main(options: argparse.Namespace) -> None:
    """Body of a rank; rank 0 prints a line of JSON for each comparison."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = Runs(Path(options.folder))
    work: list[tuple[str, float, tuple[str, ...]]] = []
    if options.part != "bert":
        work += [(f"20 M, stage {s}", options.times, (*SMALL, f"zero.stage={s}")) for s in options.stages]
    if options.part != "stages":
        work.append(("BERT-Large's blocks, stage 2", 1 / (1 - 0.35), (*BERT, "zero.stage=2")))
    for name, times, overrides in work:
        row = compare(runs, name, times, (*overrides, *options.overrides), options.rate)
        if dist.get_rank() == 0:
            print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # runs leave threads and groups behind, whose end may meet that of another rank


# ------------------------------------------------------------------ table


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each comparison."""
    head = f"{'':30} {'rate MB/s':>9} {'free s':>7} {'flat s':>7} {'int8 s':>7} {'faster':>7} {'exposed flat':>12} {'int8':>6} {'MB flat':>8} {'int8':>6}"
    lines = [head]
    for r in rows:
        lines.append(
            f"{r['name']:30} {r['rate'] / 1e6:9.1f} {r['free']:7.2f} {r['flat']:7.2f} {r['int8']:7.2f} {r['flat'] / r['int8']:6.2f}x "
            f"{r['flat_exposed']:12.1%} {r['int8_exposed']:6.1%} {r['flat_bytes'] / 1e6:8.1f} {r['int8_bytes'] / 1e6:6.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Start the ranks in their nodes, print the table; `--json FILE` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("stages", "bert", "all"), default="all")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--times", type=float, default=4.0, help="flat step over the step on an unlimited network")
    parser.add_argument("--rate", type=float, help="bytes/s of a node's link, in place of the search")
    parser.add_argument("--timeout", type=float, default=400.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    options.overrides = overrides
    if options.folder:
        rank_main(options)
        return
    from partita.runtime.emulation import Network, unavailable

    if unavailable():
        raise SystemExit(f"no emulated network here: {unavailable()}")
    with Network(2) as network, tempfile.TemporaryDirectory(prefix="partita_bench_") as folder:
        command = [sys.executable, __file__, "--folder", folder, *sys.argv[1:]]
        ended = network.run(command, ranks=2, timeout=options.timeout)
    if any(e.status for e in ended):
        raise SystemExit("\n".join(f"rank {e.rank} ({e.status}):\n{e.output[-3000:]}" for e in ended if e.status))
    rows = [json.loads(line[4:]) for line in ended[0].output.splitlines() if line.startswith("ROW ")]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
