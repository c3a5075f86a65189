"""Does training with experts pay, and do loads stay even? The default corpus on 4 ranks, each way of balancing against a dense model.

    python scripts/bench/moe_balance.py                     # 5 runs of 400 updates; a few minutes on two cores
    python scripts/bench/moe_balance.py --steps 1000 model.width=256 model.layers=6

All models multiply a token with equally many weights (the router aside): k experts are as wide together as the dense feed-forward layer.
All see the same tokens in the same order. Exit status 1 where MaxVio (Wang et al. 2024, equation 4: how far the fullest expert is above
the mean load) is 0.3 or more at the end, or a loss is not below the dense one. Other arguments are overrides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 0.3  # of MaxVio at the end
LAST = 20  # updates that the figures of the end are the mean of
FFN, TOP_K = 512, 2
COMMON = (
    "model.layers=4", "model.width=128", f"model.ffn={FFN}", "optimizer.lr=2e-3", "train.sample=0", "train.save_at_end=false",
    "tracker=none", "train.log_every=100000", "train.eval_batches=20", "parallel.data=4",
)  # fmt: skip
EXPERTS = ("+strategy=moe_zero3", "moe.experts=8", f"moe.top_k={TOP_K}", f"moe.ffn={FFN // TOP_K}")
# the usual 0.01 leaves MaxVio at 0.34 to 0.40 after 400 updates of this little model
AUX = ("moe.aux_weight=0.05",)
RUNS: dict[str, tuple[str, ...]] = {
    "dense": ("+strategy=zero3",),
    "sequence": (*EXPERTS, *AUX, "moe.balance=sequence"),
    "batch": (*EXPERTS, *AUX, "moe.balance=batch"),
    "global": (*EXPERTS, *AUX, "moe.balance=global"),
    # routed by sigmoids, without its shared expert: all weights of a token are those of two routed experts here, too
    "bias": (*EXPERTS, "moe=deepseek", "moe.shared=0", "moe.balance=bias"),
}


def train(folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """Lines of metrics.jsonl. Raises RuntimeError with the output of a run that failed."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"run.dir={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def end_of(lines: list[dict[str, float]], name: str) -> float:
    """Mean of a figure over the last updates."""
    return statistics.mean([line[name] for line in lines if name in line][-LAST:])


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    args, overrides = parser.parse_known_args()
    print(f"{'balance':10s} {'loss':>8s} {'eval loss':>10s} {'MaxVio':>8s} {'entropy':>8s} {'seconds':>8s}")
    losses: dict[str, float] = {}
    good = True
    with tempfile.TemporaryDirectory(prefix="partita_moe_") as scratch:
        for name in args.only:
            lines = train(Path(scratch) / name, [*COMMON, *RUNS[name], f"train.steps={args.steps}", *overrides])
            losses[name] = next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)
            figures = f"{name:10s} {end_of(lines, 'loss'):8.4f} {losses[name]:10.4f}"
            seconds = sum(line.get("seconds", 0.0) for line in lines)
            if name == "dense":
                print(f"{figures} {'':8s} {'':8s} {seconds:8.0f}", flush=True)
                continue
            violation = end_of(lines, "moe_max_violation")
            print(f"{figures} {violation:8.3f} {end_of(lines, 'moe_entropy'):8.3f} {seconds:8.0f}", flush=True)
            good &= violation < MOST and losses[name] < losses.get("dense", float("inf"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
