"""What checkpoints cost: stall of the loop, write bandwidth against the disk's, bytes and memory of a load.

python scripts/bench/checkpoint.py                                   # a model of 25 million parameters, ZeRO-1 on 2 ranks
python scripts/bench/checkpoint.py +strategy=zero3 parallel.data=4 model.width=1024

Times count on an idle machine only. Exit status 1 where a promise does not hold: stall at most 5 % of a step, 0.8 of the disk's
sequential bandwidth, each rank reads its share (and the blocks around it), peak extra memory at most 1.5 of the share.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 9  # updates timed without a save, and with one each
BLOCKS = 3 << 20  # bytes that a rank may read besides its share: the blocks at the ends of its ranges
COPY = 16 << 20  # bytes of memory for one chunk, and what Python needs
MODEL = (
    "model.layers=8", "model.width=512", "model.heads=8", "model.vocab=4096", "data=synthetic", "data.limit=400000", "data.sequence=128",
    "train.global_batch=16", "train.steps=1000", "train.keep=1000", "train.sample=0", "tracker=none", "run.dir=bench",
)  # fmt: skip


def disk_bandwidth(folder: Path, size: int) -> float:
    """Bytes/s of one sequential write through to the disk: through the page cache or past it, whichever is faster, best of three."""
    return max(_sequential(folder / "sequential", size, flag) for flag in (0, getattr(os, "O_DIRECT", 0)) for _ in range(3))


def _sequential(path: Path, size: int, flag: int) -> float:
    chunk = mmap.mmap(-1, 8 << 20)  # begins on a page, as direct writes want it
    chunk.write(os.urandom(8 << 20))
    begun = time.perf_counter()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag, 0o644)
        for _ in range(0, size, len(chunk)):
            os.write(handle, chunk)
    except OSError:
        return 0.0  # a file system that has no direct writes
    os.fsync(handle)
    os.close(handle)
    seconds = time.perf_counter() - begun
    path.unlink()
    return -(-size // len(chunk)) * len(chunk) / seconds


def reset_peak() -> None:
    """Forget the peak of resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
    """VmRSS (now) or VmHWM (peak) in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10


def _seconds(do: Callable[[], None]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def bench(spec: Any) -> dict[str, Any]:
    """One rank: everything that is measured, gathered on all of them."""
    from partita.train.index import list_checkpoints
    from partita.train.loop import StepClock, one_update
    from partita.train.resume import save
    from partita.train.run import open_run
    from partita.train.saving import remove_checkpoint

    run = open_run(spec)
    clock, plain, saving, stalls = StepClock(), [], [], []

    def update() -> float:
        begun = time.perf_counter()
        one_update(run, run.step + 1, run.data.step(run.step + 1), clock)
        run.step += 1
        return time.perf_counter() - begun

    for _ in range(3):
        update()
    for _ in range(STEPS):
        plain.append(update())
    save(run)  # the first one allocates the copy's memory
    run.checkpoints.wait()
    for _ in range(STEPS):
        begun = time.perf_counter()
        save(run)
        stalls.append(time.perf_counter() - begun)
        saving.append(update())
        run.checkpoints.wait()
    writes = []
    for _ in range(3):
        dist.barrier()
        run.step += 1  # none is replaced: the disk's own figure removes nothing either
        save(run)
        begun = time.perf_counter()  # the copy is made; it counts as the stall
        run.checkpoints.wait()
        writes.append(time.perf_counter() - begun)
    write = min(writes)
    own = sum(s.data.nbytes for s in run.engine.load_slices())
    saved = sum(s.data.nbytes for s in run.engine.save_slices())
    path = run.checkpoints.latest()
    assert path is not None
    oldest = list_checkpoints(path.parent)[0].path
    removal = _seconds(lambda: remove_checkpoint(oldest)) if run.rank == 0 else 0.0
    reset_peak()
    before = resident("VmRSS")
    begun = time.perf_counter()
    run.checkpoints.load(path, run.engine.load_slices())
    load, extra = time.perf_counter() - begun, resident("VmHWM") - before
    report = run.checkpoints.report
    assert report is not None
    row = {
        "step": statistics.median(plain), "step_saving": statistics.median(saving), "stall": statistics.median(stalls), "write": write,
        "saved": saved, "own": own, "read": report.bytes_read, "load": load, "extra": extra, "removal": removal,
    }  # fmt: skip
    rows: list[Any] = [None] * run.mesh.world
    dist.all_gather_object(rows, row) if run.mesh.world > 1 else rows.__setitem__(0, row)
    run.close()
    return {"rows": rows}


def main() -> int:
    """Measure, print, judge."""
    from dataclasses import replace

    from partita.config.compose import compose_config, registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.launch import launch
    from partita.runtime.spec import RunSpec

    overrides = sys.argv[1:] or ["+strategy=zero1", "parallel.data=2"]
    if overrides[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    config, job = compose_config([*MODEL, *overrides])
    planned = make_plan(config, registry_for(()))
    planned.raise_problems()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="partita_checkpoint_", dir=os.environ.get("BENCH_DISK")) as scratch:
        spec = RunSpec(to_plain(config), planned.plan, replace(job, dir=Path(scratch) / "run"), planned.plan.layout.world)
        rows = launch(bench, spec, spec.ranks)["rows"]
        total = sum(r["saved"] for r in rows)
        disk = disk_bandwidth(Path(scratch), max(total, 64 << 20))
    return judge(rows, total, disk)


def judge(rows: list[dict[str, Any]], total: int, disk: float) -> int:
    """The table; 1 where a promise does not hold."""
    stall = max(r["stall"] / r["step"] for r in rows)
    longer = max(r["step_saving"] / r["step"] for r in rows)
    rate = total / max(r["write"] for r in rows)
    read = max(r["read"] - r["own"] for r in rows)
    share = max(max(r["extra"] - COPY, 0) / r["own"] for r in rows)
    print(f"checkpoint of {total / 1e6:.0f} MB by {len(rows)} ranks; step {1e3 * max(r['step'] for r in rows):.0f} ms")
    lines = [
        ("stall of the loop", f"{100 * stall:.1f} % of a step", stall <= 0.05),
        ("write", f"{rate / 1e6:.0f} MB/s, {rate / disk:.2f} of a sequential write ({disk / 1e6:.0f} MB/s)", rate >= 0.8 * disk),
        ("load reads", f"{max(r['read'] for r in rows) / 1e6:.0f} MB for a share of {max(r['own'] for r in rows) / 1e6:.0f} MB", read <= BLOCKS),
        ("load's extra memory", f"{max(r['extra'] for r in rows) / 1e6:.1f} MB, {share:.2f} of the share", share <= 0.5),
    ]  # fmt: skip
    for what, text, good in lines:
        print(f"{what:20s} {text:60s} {'' if good else 'NOT AS PROMISED'}")
    print(
        f"a step while a save is written takes {longer:.2f} of one without; load {max(r['load'] for r in rows):.2f} s; "
        f"removal of an older one, in the background {max(r['removal'] for r in rows):.2f} s"
    )
    return 0 if all(good for _, _, good in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
