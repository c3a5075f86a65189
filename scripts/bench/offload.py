"""Offload against what the machine can do: files against a plain loop of the same requests (and fio), the CPU update against torch's.

python scripts/bench/offload.py [--folder DIR] [--megabytes N] [--elements N] [--turns N] [--threads N] [--json FILE]

Files: reading and writing extents of four states as the update does, beside a loop of threads that issues the same direct requests.
Step: an update with its states in files over the larger of compute and transfer, the bound of a perfect overlap.
Update: one AdamW step over flat buffers; float32, and bfloat16 gradients with a bfloat16 copy, which torch needs two more passes for.
All pairs take turns; medians; ratios above 1 mean that ours is faster.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import partita_kernels as kernels
from partita.state.layout import HyperGroup
from partita.state.optimizers import Adam, State
from partita.state.tiers import Array, FarUpdater, TierRequest, aligned_empty
from partita.state.tiers.lane import Lane
from partita.state.tiers.updater import EXTENT, SLOTS
from partita_offload.direct import REQUEST, THREADS
from partita_offload.file import FileTier

CPU = torch.device("cpu")
STATES = 4  # master, two moments, gradients
HYPER: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def main() -> None:
    """Run what was asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=512, help="bytes of states in the file")
    parser.add_argument("--elements", type=int, default=100_000_000, help="weights of the CPU update")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [*files(args.folder, args.megabytes << 20, args.turns), *updates(args.elements, args.turns)]
    table = Table("what", "ours", "other", "ratio", title="offload, medians of interleaved turns")
    for row in rows:
        table.add_row(row["what"], row["ours"], row["other"], f"{row['ratio']:.2f}")
    Console(width=130).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def turns(count: int, *sides: Callable[[], Any]) -> list[float]:
    """Median seconds of each side, which take turns; the first turn only warms up."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(count + 1):
        for side, own in zip(sides, seconds, strict=True):
            began = time.perf_counter()
            side()
            if turn:
                own.append(time.perf_counter() - began)
    return [statistics.median(s) for s in seconds]


# ------------------------------------------------------------------ files


def files(folder: Path, size: int, count: int) -> list[dict[str, Any]]:
    """Rates of the file tier, of a plain loop and of fio, and the step against its bound."""
    numel = size // 4 // STATES // EXTENT * EXTENT or EXTENT
    moved = numel * 4 * STATES
    tier = FileTier(TierRequest(CPU, 1, str(folder)))
    tier.reserve(moved)
    stores = [tier.allocate(numel, torch.float32) for _ in range(STATES)]
    slots = [[aligned_empty(EXTENT, torch.float32).zero_() for _ in stores] for _ in range(SLOTS)]
    plain = PlainLoop(tier._file.handle, moved)
    rows = []
    for kind in ("read", "write"):
        ours, other = turns(count, partial(stream, stores, slots, kind), partial(plain.run, kind))
        rows.append(row(f"file tier, {kind}, against a plain loop", moved, ours, other))
        if (rate := fio(folder, moved, kind)) is not None:
            rows.append(row(f"file tier, {kind}, against fio", moved, ours, moved / rate))
    rows.append(step_against_bound(stores, slots, numel, count))
    plain.close()
    tier.close()
    return rows


def row(what: str, moved: int, ours: float, other: float) -> dict[str, Any]:
    """Two sides that move the same bytes."""
    return {
        "what": what,
        "ours": f"{moved / ours / 1e9:.2f} GB/s",
        "other": f"{moved / other / 1e9:.2f} GB/s",
        "ratio": other / ours,
    }


def stream(stores: list[Any], slots: list[list[torch.Tensor]], kind: str) -> None:
    """All extents once, as many under way as the update has slots."""
    waiting: list[list[Any]] = [[] for _ in slots]
    for i, lo in enumerate(range(0, stores[0].numel, EXTENT)):
        for pending in waiting[i % SLOTS]:
            pending.settle()
        waiting[i % SLOTS] = [getattr(s, kind)(lo, b) for s, b in zip(stores, slots[i % SLOTS], strict=True)]
    for pending in (p for w in waiting for p in w):
        pending.settle()


class PlainLoop:
    """Threads that take requests of the same size from a list, each into memory of its own, and do nothing else."""

    def __init__(self, handle: int, size: int) -> None:
        self._handle, self._size = handle, size
        self._pool = ThreadPoolExecutor(THREADS)
        self._memory = [mmap.mmap(-1, REQUEST) for _ in range(THREADS)]

    def run(self, kind: str) -> None:
        """All requests once."""
        call = os.preadv if kind == "read" else os.pwritev

        def work(thread: int) -> None:
            for offset in range(thread * REQUEST, self._size, THREADS * REQUEST):
                call(self._handle, [self._memory[thread]], offset)

        list(self._pool.map(work, range(THREADS)))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def fio(folder: Path, size: int, kind: str) -> float | None:
    """Bytes per second that fio reaches with the same requests; None where it isn't installed."""
    if shutil.which("fio") is None:
        return None
    name = folder / f"partita-fio-{os.getpid()}"
    command = ["fio", "--name=x", f"--filename={name}", f"--rw={kind}", f"--bs={REQUEST}", f"--size={size}", "--direct=1"]
    command += ["--ioengine=libaio", f"--iodepth={THREADS}", "--output-format=json"]
    try:
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    finally:
        name.unlink(missing_ok=True)
    return float(json.loads(out)["jobs"][0][kind]["bw_bytes"])


def step_against_bound(stores: list[Any], slots: list[list[torch.Tensor]], numel: int, count: int) -> dict[str, Any]:
    """The update of states in files as a run makes it, over the larger of the transfers alone and the update alone."""
    scale = torch.ones(())
    names = ("master", "exp_avg", "exp_avg_sq", "gradient")
    arrays = {name: Array(torch.empty(0), store) for name, store in zip(names, stores, strict=True)}
    arrays["parameter"] = arrays["master"]
    formats = {name: State("float32") for name in names[1:3]}
    layout = SimpleNamespace(shard=numel)
    bucket: Any = SimpleNamespace(arrays=arrays, formats=formats, layout=layout, keep=0, key=0, runs=lambda: [(0, 0, numel)])
    rule = Adam(HYPER["beta1"], HYPER["beta2"], HYPER["eps"], decoupled=True)
    updater = FarUpdater([bucket], [HyperGroup(1.0, HYPER["weight_decay"])], [rule], CPU, Lane(CPU))

    def pipelined() -> None:
        updater.start(1, HYPER["lr"], scale)
        updater.drain()

    def transfers() -> None:
        stream(stores, slots, "read")
        stream(stores[:3], [s[:3] for s in slots], "write")

    def compute() -> None:
        for i in range(numel // EXTENT):
            p, m, v, g = ([x] for x in slots[i % SLOTS])
            kernels.adamw_(p, g, m, v, copies=[None], step=1, scale=scale, **HYPER)

    ours, moving, computing = turns(count, pipelined, transfers, compute)
    updater.close()
    bound = max(moving, computing)
    return {
        "what": "step with states in files, over its bound",
        "ours": f"{ours:.3f} s",
        "other": f"{bound:.3f} s",
        "ratio": bound / ours,
    }


# ------------------------------------------------------------------ the CPU update


def updates(numel: int, count: int) -> list[dict[str, Any]]:
    """float32, where torch's fused update does the same; and low precision, where it needs a pass before and one after."""
    p, m, v, g = (torch.rand(numel) * 0.01 for _ in range(STATES))
    low, copy = g.bfloat16(), p.bfloat16()
    scale, step = torch.ones(()), torch.ones(())

    def ours(grad: torch.Tensor, out: torch.Tensor | None) -> None:
        kernels.adamw_([p], [grad], [m], [v], copies=[out], step=1, scale=scale, **HYPER)

    def fused() -> None:
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [step],
            lr=HYPER["lr"], beta1=HYPER["beta1"], beta2=HYPER["beta2"], weight_decay=HYPER["weight_decay"], eps=HYPER["eps"],
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def three_passes() -> None:
        g.copy_(low)
        fused()
        copy.copy_(p)

    plain = turns(count, lambda: ours(g, None), fused)
    narrow = turns(count, lambda: ours(low, copy), three_passes)
    words = (f"AdamW of {numel:,} weights, float32", "AdamW, bfloat16 gradients and copy, against torch's three passes")
    return [
        {"what": w, "ours": f"{a * 1e3:.1f} ms", "other": f"{b * 1e3:.1f} ms", "ratio": b / a}
        for w, (a, b) in zip(words, (plain, narrow), strict=True)
    ]


if __name__ == "__main__":
    main()
