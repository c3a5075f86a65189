"""Calibration of this machine, or of the nodes that torchrun or Slurm has given: what one rank finds out, and what is stored."""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.plan.calibration import Calibration
from partita.runtime import measure
from partita.runtime.device import Device
from partita.runtime.spec import RunSpec


def arithmetic() -> dict[str, Any]:
    """What a single process measures, on all cores or on the first device."""
    device = Device.current()
    return {
        "flops": {name: measure.matmul_flops(device, name) for name in measure.DTYPES},
        "memory": measure.memory_bandwidth(device),
        "overhead": measure.block_overhead(device),
        "host": measure.host_bandwidth(device),
    }


def links(spec: RunSpec | None = None) -> dict[str, Any]:
    """Entry of a rank: links inside this node, and between nodes where the ranks are on several. Rank 0's answer counts."""
    device, rank, world = Device.current(), dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, socket.gethostname())
    names = sorted(set(hosts))
    near = {name: [r for r, h in enumerate(hosts) if h == name] for name in names}
    found: dict[str, Any] = {"ranks": len(near[hosts[0]])}
    found["intra"] = _groups(device, rank, [near[name] for name in names])
    found["inter"] = (
        _groups(device, rank, [list(column) for column in zip(*near.values(), strict=False)]) if len(names) > 1 else None
    )
    return found


def _groups(device: Device, rank: int, groups: list[list[int]]) -> tuple[float, float] | None:
    """All groups at once, as in training; the link of this rank's group."""
    made = [(members, dist.new_group(members)) for members in groups]  # every rank makes all of them, in one order
    for members, group in made:
        if rank in members and len(members) > 1:
            return measure.measure_link(device, group, len(members), 2 * math.log2(len(members)))
    return None


def assemble(local: dict[str, Any], found: dict[str, Any]) -> Calibration:
    """The record that is stored."""
    when = f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    return Calibration(**local, **found, when=when)


def report(value: Calibration, key: str, path: Path) -> str:
    """What a person reads."""
    lines = [f"{key} ({value.when}), stored in {path}"]
    lines += [f"  {name:9} {rate:.3g} FLOP/s in matrix products" for name, rate in value.flops.items()]
    lines.append(f"  memory    {value.memory or 0:.3g} bytes/s; a block of no size {value.overhead * 1e6:.0f} us")
    for name, link in (("intra", value.intra), ("inter", value.inter)):
        if link:
            lines.append(f"  {name:9} {link[0]:.3g} bytes/s, {link[1] * 1e6:.0f} us a hop, {value.ranks} ranks in a node")
    if value.host:
        lines.append(f"  host      {value.host:.3g} bytes/s to the device")
    return "\n".join(lines)
