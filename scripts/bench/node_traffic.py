"""Bytes that cross between nodes in one update: ZeRO++ (and other strategies) beside ZeRO-3, on two emulated nodes of two ranks.

    python scripts/bench/node_traffic.py                       # ZeRO-3 flat and in two levels, ZeRO++, ZeRO++ with int4 gradients; 1 and 4 micro-batches
    python scripts/bench/node_traffic.py model.width=512       # other arguments are overrides of all runs

Needs Linux and the right to make network namespaces. Bytes are those that the kernel counts on the nodes' links, headers included: of a longer
run less those of a shorter one, so that start and end drop out. No time is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from partita.runtime.emulation import Network, unavailable

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
COMMON = (
    "model.layers=4", "model.width=256", "model.heads=4", "model.vocab=1024", "data=synthetic", "data.sequence=16", "precision=fp32", "tracker=none",
    "train.micro_batch=1", "lr_schedule=constant", "train.eval_at_end=false", "train.save_at_end=false", "train.sample=0", "launch.threads=1",
)  # fmt: skip
PLUS = ("+strategy=zeropp", "parallel.replicate=2", "parallel.shard=2")
WAYS = {
    "ZeRO-3": ("+strategy=zero3", "parallel.data=4"),
    "ZeRO-3, two levels": ("+strategy=zero3", "parallel.data=4", "compression.algorithm=hierarchical"),
    "ZeRO++": PLUS,
    "ZeRO++, int4 gradients": (*PLUS, "compression.gradient_reduce=int4"),
}
SHORT, LONG = 2, 6  # updates


def crossed(network: Network, folder: Path, *overrides: str) -> int:
    """Bytes that both nodes have sent to each other in a run."""
    before = sum(network.sent(node) for node in range(2))
    command = [sys.executable, str(TRAIN), f"run.dir={folder}", *COMMON, *overrides]
    ended = network.run(command, ranks=2, timeout=300)
    failed = next((e for e in ended if e.status), None)
    if failed is not None:
        raise SystemExit(f"a rank ended with status {failed.status}:\n{failed.output[-3000:]}")
    return sum(network.sent(node) for node in range(2)) - before


def update_bytes(network: Network, *overrides: str) -> float:
    """Of one update."""
    with tempfile.TemporaryDirectory(prefix="partita_bench_") as folder:
        runs = [crossed(network, Path(folder) / str(n), *overrides, f"train.steps={n}") for n in (SHORT, LONG)]
    return (runs[1] - runs[0]) / (LONG - SHORT)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    options, overrides = parser.parse_known_args()
    if reason := unavailable():
        raise SystemExit(f"no emulated network here: {reason}")
    with Network(2) as network:
        print(f"{'bytes between nodes in an update':32} {'micro-batches':>14} {'MB':>9} {'of ZeRO-3':>10}")
        for count in options.micro_batches:
            first = None
            for name, way in WAYS.items():
                size = update_bytes(network, *way, f"train.global_batch={4 * count}", *overrides)
                first = first or size
                print(f"{name:32} {count:14} {size / 1e6:9.3f} {size / first:10.3f}", flush=True)


if __name__ == "__main__":
    main()
