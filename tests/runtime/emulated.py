"""What ranks inside an emulated network do (module-level, so that worker processes can find it)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.plan.plan import Layout
from partita.runtime.collectives import GlooCollectives
from partita.runtime.emulation import LINK, inside
from partita.runtime.mesh import Mesh
from partita.runtime.transport import LoggedTransport
from partita_compression.exchange import Exchange, gather
from partita_compression.formats import FORMATS
from partita_compression.hierarchy import Levels

N = 4 * 64 * 2048  # elements of a buffer


@contextmanager
def connected(rank: int, world: int, folder: str, namespaces: list[Path]) -> Iterator[None]:
    """This rank in its node, with a process group over the node's link."""
    dist.barrier()  # all are connected: nobody leaves before
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    with inside(namespaces[rank * len(namespaces) // world]):
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=50))
        yield
        dist.barrier()


def _ways(mesh: Mesh, transport: LoggedTransport) -> dict[str, tuple[Any, Any]]:
    """(reduce-scatter, all-gather) by name; two ranks are a node."""
    group, base, format = mesh.group(("shard",)), GlooCollectives(transport), FORMATS["int8"]
    levels = Levels(mesh, node_ranks=2)
    levels.check()
    hops = levels.split(group)
    assert hops is not None
    plain = {"feedback": False, "shared": False}
    flat = Exchange(format, group, N, transport, mesh.device, **plain)  # type: ignore[arg-type]
    between = Exchange(format, hops.outer[1], N // 2, transport, mesh.device, **plain)  # type: ignore[arg-type]
    return {
        "flat native": (lambda p, s: base.reduce_scatter(p, s, group, accumulate=False), lambda w: base.all_gather(w, group)),
        "flat int8": (lambda p, s: flat.reduce_scatter(p, s, accumulate=False), lambda w: gather(format, transport, w, group)),
        "hierarchical native": (
            lambda p, s: hops.reduce_scatter(base, None, p, s, accumulate=False),
            lambda w: hops.all_gather(base, None, w),
        ),
        "hierarchical int8": (
            lambda p, s: hops.reduce_scatter(base, between, p, s, accumulate=False),
            lambda w: hops.all_gather(base, format, w),
        ),
    }


def volumes(rank: int, world: int, folder: str, namespaces: list[Path]) -> dict[str, Any]:
    """For each way to travel: (largest relative error of a reduction and a gather, bytes that this node's link carried for each)."""
    out: dict[str, Any] = {}
    with connected(rank, world, folder, namespaces):
        mesh, transport = Mesh(Layout(shard=world), rank, torch.device("cpu")), LoggedTransport()
        group = mesh.group(("shard",))
        sources = [torch.randn(N, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        true = torch.stack(sources).sum(0)
        for way, (reduce_scatter, all_gather) in _ways(mesh, transport).items():
            part, whole = torch.empty(N // world), true.clone()
            mine = true.view(world, -1)[rank]
            whole.view(world, -1)[[r for r in range(world) if r != rank]] = 0.0
            before = _carried()
            reduce_scatter(part, sources[rank]).wait()
            between = _carried()
            all_gather(whole).wait()
            after = _carried()
            error = max(float((part - mine).norm() / mine.norm()), float((whole - true).norm() / true.norm()))
            tallies = {k: v.bytes for k, v in transport.take().items()}
            out[way] = (error, between - before, after - between, tallies)
        out["seconds"] = _seconds(transport, group)
    return out


def _seconds(transport: LoggedTransport, group: Any) -> tuple[float, float]:
    """(seconds of an exchange of whole buffers, bytes that this rank sent to the other node)."""
    source = torch.ones(N)
    start = time.perf_counter()
    transport.all_to_all(torch.empty_like(source), source, group, "test").wait()
    return time.perf_counter() - start, N * 4 // 2


def _carried() -> int:
    """Bytes that this node's link has carried, all ranks agreed on the moment."""
    dist.barrier()
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    dist.barrier()
    return int(next(line for line in lines if LINK in line).split(":")[1].split()[8])


def packet(n: int) -> int:
    """Bytes of n elements in int8."""
    return FORMATS["int8"].size(n)
