"""Injects each fault into a small run and looks whether the report names it: who, when, where, and how soon.

python scripts/bench/faults.py              # all; prints the table of docs/diagnosis.md; exit status 1 where one is named wrongly
python scripts/bench/faults.py nonfinite stop     # these
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kills import Runner, session_members, wait_for_end

LIMIT = 30.0  # seconds from the fault to its name
Line = dict[str, Any]


@dataclass
class Case:
    """A fault, what else the command line needs, and what the report must say. `named`: of a line of the report, whether it is right."""

    overrides: tuple[str, ...]
    named: Callable[[Line], bool]
    words: str


def found(kind: str, about: Any = None, step: int | None = None, **more: Any) -> Callable[[Line], bool]:
    """A line of diagnosis.jsonl with these values."""

    def right(line: Line) -> bool:
        values = {"about": about, **more}
        return (
            line.get("kind") == kind
            and (step is None or line["step"] == step)
            and all(v is None or line.get(k) == v or (isinstance(v, str) and v in str(line.get(k))) for k, v in values.items())
        )

    return right


def failed(rank: int, step: int, word: str) -> Callable[[Line], bool]:
    """failure.json, which the process that started the ranks writes."""
    return lambda line: (line.get("rank"), line.get("step")) == (rank, step) and word in line.get("cause", "")


LONG = "train.steps=2000"
CASES: dict[str, Case] = {
    "kill": Case(("faults.rank=1",), failed(1, 5, "SIGKILL"), "rank, step"),
    "lost_node": Case(("faults.rank=2", "parallel.data=4"), failed(2, 5, "rank 3: a whole node"), "ranks, step"),
    "stop": Case(("faults.rank=1", "diagnosis.hang_after=4", "diagnosis.on_hang=stop"), found("hang", [1], 5, cause="SIGSTOP"), "rank, step"),
    "slow": Case(("faults.rank=1", LONG), found("straggler", 1), "rank"),
    "nonfinite": Case(("faults.rank=1", "faults.target=blocks.1.mlp.up"), found("nonfinite", "blocks.1.mlp.up", 5, ranks=[1]), "rank, step, module"),
    "flip": Case(
        ("faults.rank=1", "faults.target=blocks.0.mlp.up.weight", "diagnosis.replicas_every=1", LONG),
        found("replicas", "blocks.0.mlp.up.weight", ranks=[1]), "rank, parameter",
    ),
    "corrupt": Case(("faults.rank=1", "diagnosis.recompute_every=1", LONG), found("corruption", 1), "rank"),
    "full_disk": Case(("faults.rank=1", "train.save_every=3"), found("checkpoint", cause="rank 1: no space left"), "rank, file, bytes"),
    "slow_disk": Case(("faults.rank=1", "train.save_every=3", "faults.seconds=6", "diagnosis.slow_save=1", LONG), found("disk", [1]), "rank, folder"),
    "unreadable": Case(
        ("faults.rank=1", "faults.step=302", "train.save_every=300", "diagnosis.verify_every=0.2", LONG),
        found("checkpoint", cause="step-00000300/rank-00001.bin is damaged"), "file, bytes",
    ),
    "spike": Case(("faults.step=25", "diagnosis.on_spike=skip"), found("spike", 25, 25), "step"),
    "memory": Case(("faults.rank=1",), found("memory", 1, 5, cause="rank 1 ran out of memory"), "rank, step"),
    "clock": Case(("faults.rank=1", "faults.seconds=3600", LONG), found("clock", 1), "rank, seconds"),
}  # fmt: skip


def lines(folder: Path) -> list[Line]:
    """What has been reported so far."""
    out: list[Line] = []
    for path in (folder / "diagnosis.jsonl", folder / "log" / "failure.json"):
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                out.append(json.loads(text))
            except ValueError:
                continue  # it is being written
    return out


def inject(name: str, case: Case, runner: Runner, folder: Path) -> tuple[float | None, Line]:
    """(seconds from the fault to its name, or None; the line that named it, or the last one)."""
    runner.overrides = [
        "parallel.data=2",
        "lr_schedule=constant",
        f"+faults={name}",
        "+diagnosis=on",
        "train.on_save_error=stop",
        *case.overrides,
    ]
    pid, mark, begun = runner.start(folder), folder / "log" / "fault.txt", None
    end = time.monotonic() + 3 * LIMIT
    seconds, right = None, None
    while time.monotonic() < end and right is None:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        begun = begun or (time.monotonic() if mark.exists() else None)
        right = next((line for line in lines(folder) if case.named(line)), None)
        if right is not None:
            seconds = time.monotonic() - (begun or time.monotonic())
        elif ended or (begun and time.monotonic() - begun > LIMIT):
            break
        time.sleep(0.02)
    for member in session_members(pid):
        os.kill(member, signal.SIGKILL)
    wait_for_end(pid)
    return seconds, right or (lines(folder) or [{"cause": f"nothing was reported: {Path(f'{folder}.out').read_text()[-1500:]}"}])[
        -1
    ]


def main() -> int:
    """Inject, look, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", default=[], help=f"of {', '.join(CASES)}; default: all")
    args = parser.parse_args()
    unknown = [f for f in args.faults if f not in CASES]
    if unknown:
        parser.error(f"no fault {unknown[0]!r}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)  # this process forks
    runner, wrong = Runner(["parallel.data=2"], fork=True), 0
    print("| fault | named | within | in words |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="partita_faults_") as scratch:
        for name in args.faults or list(CASES):
            seconds, line = inject(name, CASES[name], runner, Path(scratch) / name)
            good = seconds is not None and seconds <= LIMIT
            wrong += not good
            within = f"{seconds:.1f} s" if seconds is not None else "never"
            cause = str(line.get("cause", "")).replace("\n", " ").replace("|", "/").replace(scratch, "outputs")
            print(f"| `{name}` | {CASES[name].words if good else 'NOT NAMED'} | {within} | {cause} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
