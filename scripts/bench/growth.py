"""Does memory grow? Resident memory of every rank over a long run of a small model with saves and evaluations.

python scripts/bench/growth.py [--steps 2000] [--first 200] [--every 50] [overrides ...]

The run is the usual command in processes of its own, watched from outside. Prints for each rank the medians of resident memory in the
100 steps after `--first` and in the last 100, and their ratio; exit status 1 where one grew by more than 2 %.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
COMMON = (
    "model.layers=4", "model.width=64", "model.heads=4", "data.sequence=32", "train.global_batch=8", "train.sample=0",
    "train.eval_batches=2", "tracker=none", "launch.threads=1", "launch.ranks=2",
)  # fmt: skip
ALLOWED = 1.02


def main() -> int:
    """Run, watch, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between saves, and between evaluations")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        often = [f"train.steps={args.steps}", f"train.save_every={args.every}", f"train.eval_every={args.every}"]
        command = [sys.executable, str(TRAIN), f"run.dir={folder}", *COMMON, *often, *overrides]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        seen = watch(run, Path(folder))
        if run.wait():
            print(f"the run failed: {' '.join(command)}")
            return 1
    return report(seen, args.first, args.steps)


def watch(run: subprocess.Popen[bytes], folder: Path) -> dict[int, list[tuple[int, int]]]:
    """Rank -> (step, resident bytes), ten times a second until the run ends."""
    seen: dict[int, list[tuple[int, int]]] = {}
    while run.poll() is None:
        time.sleep(0.1)
        metrics = folder / "metrics.jsonl"
        step = metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0
        for log in folder.glob("log/rank*.log"):
            found = re.search(r"rank (\d+) of \d+, process (\d+)", log.read_text(errors="replace"))
            size = resident(int(found[2])) if found and step else 0
            if found and size:
                seen.setdefault(int(found[1]), []).append((step, size))
    return seen


def resident(process: int) -> int:
    """Bytes of a process that lie in memory; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def report(seen: dict[int, list[tuple[int, int]]], first: int, steps: int) -> int:
    """A line for each rank; the exit status."""
    status = 0 if seen else 1
    for rank, samples in sorted(seen.items()):
        early = [size for step, size in samples if first <= step < first + 100]
        late = [size for step, size in samples if step >= steps - 100]
        if not early or not late:
            print(f"rank {rank}: too few samples; use more steps")
            return 1
        a, b = statistics.median(early), statistics.median(late)
        status |= b > ALLOWED * a
        print(f"rank {rank}: {a / 1e6:.1f} MB at step {first}, {b / 1e6:.1f} MB at the end, ratio {b / a:.4f}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
