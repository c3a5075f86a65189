"""Sharded training side by side: Partita's stages, torch DDP and FSDP2, DeepSpeed where it is installed (`make bench-peers`).

    python scripts/bench/state.py                                      # a GPT of 20 M parameters, fp32, two gloo ranks with a core each
    python scripts/bench/state.py --dtype bf16 --accumulation 4
    python scripts/bench/state.py --size 120m --engines ddp,fsdp2,partita3 --rounds 4
    python scripts/bench/state.py --engines ddp,partita2,my_engine.py:Mine   # an engine of your own (see state_engines.Engine)

All engines train the same seeded model on the same text with the same AdamW. All are started, then take turns (A B C A B C), so that
ratios hold on a machine that has other work too. Written: a table on the console, JSON and an SVG plot in --out.
This process imports no torch, so that a rank's peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from state_report import console_table, summarise, svg_plot  # noqa: E402

DEFAULT = "ddp,fsdp2,fsdp2_whole,deepspeed0,deepspeed1,deepspeed2,deepspeed3,partita0,partita1,partita2,partita3"


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--engines", default=DEFAULT, help="comma-separated; the first one is the base of the ratios")
    p.add_argument("--size", default="20m", help="2m, 20m or 120m (parameters)")
    p.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    p.add_argument("--accumulation", type=int, default=1, help="micro-batches of an update")
    p.add_argument("--micro", type=int, default=2, help="sequences of a rank's micro-batch")
    p.add_argument("--sequence", type=int, default=256, help="tokens")
    p.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: none")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--rounds", type=int, default=6, help="turns of each engine")
    p.add_argument("--turn", type=int, default=2, help="updates of a turn")
    p.add_argument("--warmup", type=int, default=2, help="updates before the first turn, not counted")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds until an engine that says nothing is given up")
    p.add_argument("--out", type=Path, default=Path("outputs/bench/state"), help="folder for JSON and SVG")
    p.add_argument("--override", action="append", default=[], help="config override for Partita's engines, e.g. zero.prefetch=2")
    p.add_argument("--profile", type=Path, help="folder for a torch profile of rank 0 of each engine (after the turns)")
    return p.parse_args()


@dataclass
class Team:
    """The ranks of one engine."""

    name: str
    ranks: list[subprocess.Popen[str]]
    logs: list[Path]
    turns: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def ask(self, message: str, tag: str, timeout: float) -> list[Any]:
        """Send a line to all ranks; their answers that begin with `tag`. Sets `error` where a rank has none."""
        for rank in self.ranks:
            try:
                assert rank.stdin is not None
                rank.stdin.write(message + "\n")
                rank.stdin.flush()
            except OSError:
                pass
        return self.answers(tag, timeout)

    def answers(self, tag: str, timeout: float) -> list[Any]:
        """One answer of each rank; empty after an error."""
        found = []
        end = time.monotonic() + timeout
        for number, rank in enumerate(self.ranks):
            line = _line(rank, tag, end)
            if line is None:
                tail = self.logs[number].read_text(errors="replace").strip().splitlines()[-1:]
                self.error = self.error or (tail[0] if tail else f"rank {number} said nothing within {timeout:g} s")
                self.end()
                return []
            found.append(json.loads(line[len(tag) :] or "null"))
        return found

    def end(self) -> None:
        """Stop the ranks."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def _line(rank: subprocess.Popen[str], tag: str, end: float) -> str | None:
    """The next line with that tag; other output is skipped."""
    import select

    assert rank.stdout is not None
    while time.monotonic() < end:
        if not select.select([rank.stdout], [], [], 0.5)[0]:
            continue
        line = rank.stdout.readline()
        if not line:
            return None
        if line.startswith(tag):
            return line.rstrip("\n")
    return None


def start(name: str, args: argparse.Namespace, folder: Path) -> Team:
    """Start the ranks of an engine, each bound to one core."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    ranks, logs = [], []
    for rank in range(args.ranks):
        environment = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        log = folder / f"{name.replace('/', '_')}.{rank}.log"
        command = [sys.executable, str(HERE / "state_rank.py"), name, json.dumps(vars(args), default=str)]
        core = cores[rank % len(cores)]
        with log.open("w") as err:
            ranks.append(
                subprocess.Popen(
                    ["taskset", "-c", str(core), *command],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                    bufsize=1,
                )
            )
        logs.append(log)
    return Team(name, ranks, logs)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start all, give turns, end all. Returns engine -> results."""
    names = args.engines.split(",")
    with tempfile.TemporaryDirectory(prefix="partita_bench_") as folder:
        teams = []
        try:
            for name in names:  # one after the other, so that they don't disturb each other's start
                team = start(name, args, Path(folder))
                teams.append(team)
                team.answers("READY", args.timeout)
                print(f"{name}: {team.error or 'ready'}", file=sys.stderr, flush=True)
            for number in range(args.rounds):
                for team in (t for t in teams if not t.error):
                    ranks = team.ask(f"go {args.turn}", "TURN ", args.timeout)
                    if ranks:
                        team.turns.append(
                            {
                                # an update ends when its slowest rank does
                                "wall": [max(step) for step in zip(*(r["wall"] for r in ranks), strict=True)],
                                "cpu": [sum(step) / len(step) for step in zip(*(r["cpu"] for r in ranks), strict=True)],
                            }
                        )
                print(f"round {number + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            finals = {t.name: [] if t.error else t.ask("end", "END ", args.timeout) for t in teams}
            return {t.name: {"error": t.error} if t.error else {"turns": t.turns, "ranks": finals[t.name]} for t in teams}
        finally:
            for team in teams:
                team.end()


def main() -> None:
    """Run, print, write."""
    args = arguments()
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
        args.profile = args.profile.absolute()
    results = run(args)
    rows = summarise(results, base=args.engines.split(",")[0])
    what = f"GPT {args.size}, {args.dtype}, accumulation {args.accumulation}, {args.micro} x {args.sequence} tokens a rank and micro-batch, {args.ranks} ranks"
    print(console_table(rows, what))
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"{args.size}_{args.dtype}_acc{args.accumulation}"
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    stem.with_suffix(".json").write_text(json.dumps({"settings": settings, "summary": rows, "results": results}, indent=1))
    stem.with_suffix(".svg").write_text(svg_plot(rows, what))
    print(f"written: {stem}.json, {stem}.svg")
    if any("error" in row for row in rows.values() if not row.get("missing")):
        sys.exit(1)


if __name__ == "__main__":
    main()
