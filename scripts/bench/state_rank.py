"""One rank of one engine of `state.py`: trains when it is told to, and measures itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from state_engines import make_engine
from state_report import NOT_INSTALLED


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status, such as VmHWM (peak) and VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def bytes_sent() -> int:
    """Bytes that this process's TCP sockets have sent and seen acknowledged (TCP_INFO)."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            s = socket.socket(fileno=os.dup(int(fd)))
        except OSError:
            continue
        with contextlib.closing(s), contextlib.suppress(OSError):
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                total += struct.unpack_from("<Q", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 120)[0]
    return total


def serve(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Warm up, then updates as asked for; returns what was measured."""
    engine, base = make_engine(name, args), [0]
    base[0] = status("VmRSS")  # everything is imported, nothing is built
    engine.build()
    losses = [engine.update(step) for step in range(args.warmup)]
    step = args.warmup
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak of what follows
    before = bytes_sent()
    print("READY", flush=True)
    for line in sys.stdin:
        if line.startswith("end"):
            break
        dist.barrier()
        wall, cpu = [], []
        for _ in range(int(line.split()[1])):
            t, c = time.perf_counter(), time.process_time()
            losses.append(engine.update(step))
            wall.append(time.perf_counter() - t)
            cpu.append(time.process_time() - c)
            step += 1
        print("TURN " + json.dumps({"wall": wall, "cpu": cpu}), flush=True)
    sent = (bytes_sent() - before) / max(1, step - args.warmup)
    peak = status("VmHWM")
    if args.profile:
        profile(engine, step, Path(args.profile) / f"{Path(name).stem}.txt")
    whole = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(whole)
    return {"losses": (whole / dist.get_world_size()).tolist(), "sent": sent, "peak": peak, "base": base[0]}


def profile(engine: Any, step: int, path: Path) -> None:
    """A table of torch's profiler over three updates."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU]) as found:
        for i in range(3):
            engine.update(step + i)
    if dist.get_rank() == 0:
        path.write_text(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=70))


def main() -> None:
    """`state_rank.py ENGINE SETTINGS`; the settings are JSON."""
    name, args = sys.argv[1], argparse.Namespace(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = serve(name, args)
    except ModuleNotFoundError as error:
        print(f"{NOT_INSTALLED}{error.name} is not installed: make bench-peers", file=sys.stderr)
        os._exit(3)
    print("END " + json.dumps(result), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind


if __name__ == "__main__":
    main()
