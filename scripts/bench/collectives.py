"""Our collectives beside gloo's own, and latency and bandwidth (alpha and beta) of each level of the network.

    python scripts/bench/collectives.py                                    # 2 and 4 ranks of this machine, over loopback
    python scripts/bench/collectives.py --nodes 2 --ranks 2 --rate 50e6    # two emulated nodes (Linux, root), bytes/s of a node's link
    torchrun --nnodes 2 --nproc-per-node 2 ... scripts/bench/collectives.py --store    # the nodes that are there

--store keeps alpha and beta where plans for this machine read them, as scripts/calibrate.py does. All ways take turns (A B A B), so that a
busy machine slows all of them; times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # elements of float32 of the whole buffer
BUDGET = 2.0  # seconds for all ways of one size


# ------------------------------------------------------------------ one rank


def rank_main(options: argparse.Namespace) -> None:
    """Body of a rank; rank 0 prints one line of JSON."""
    import torch
    import torch.distributed as dist

    from partita.runtime.calibrate import links

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for elements in SIZES for row in _measure(elements)] if not options.links_only else []
    found = links()
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps({"rows": rows, "links": found, "world": dist.get_world_size()}), flush=True)
        if options.store:
            _store(found)
    dist.barrier()
    dist.destroy_process_group()


def _measure(elements: int) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    ways = _ways(elements)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()  # warm: memory is touched, buffers are connected
    began = time.perf_counter()
    over = torch.zeros(1)
    while not over and len(next(iter(spent.values()))) < 50:
        for name, work in ways.items():
            dist.barrier()
            start = time.perf_counter()
            work()
            spent[name].append(time.perf_counter() - start)
        over[0] = time.perf_counter() - began > BUDGET
        dist.broadcast(over, 0)
    mine = torch.tensor([statistics.median(v) for v in spent.values()], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return [{"elements": elements, "way": name, "seconds": s} for name, s in zip(ways, mine.tolist(), strict=True)]


def _ways(elements: int) -> dict[str, Callable[[], Any]]:
    """What is compared, by name; `gloo ...` is the backend's own."""
    import torch
    import torch.distributed as dist

    from partita.plan.plan import Layout
    from partita.runtime.collectives import GlooCollectives
    from partita.runtime.mesh import Mesh
    from partita_compression.exchange import Exchange, gather
    from partita_compression.formats import FORMATS

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(Layout(shard=world), rank, torch.device("cpu"))
    group, base = mesh.group(("shard",)), GlooCollectives()
    source, part = torch.randn(elements), torch.empty(elements // world)
    whole, mine = torch.randn(elements), torch.randn(elements // world)
    exchange = Exchange(FORMATS["int8"], group, elements, base.transport, mesh.device, feedback=False, shared=False)
    return {
        "gloo reduce-scatter": lambda: dist.reduce_scatter_tensor(part, source),
        "reduce-scatter": lambda: base.reduce_scatter(part, source, group, accumulate=False).wait(),
        "reduce-scatter int8": lambda: exchange.reduce_scatter(part, source, accumulate=False).wait(),
        "gloo all-gather": lambda: dist.all_gather_into_tensor(whole, mine),
        "all-gather": lambda: base.all_gather(whole, group).wait(),
        "all-gather int8": lambda: gather(FORMATS["int8"], base.transport, whole, group).wait(),
    }


def _store(found: dict[str, Any]) -> None:
    """Alpha and beta into the user's calibration, beside what is known of arithmetic."""
    from dataclasses import replace

    from partita.config.schema import ClusterConfig, LaunchConfig
    from partita.plan.calibration import calibration_file, read_calibration, write_calibration
    from partita.plan.cluster import find_cluster, this_machine
    from partita.runtime.calibrate import arithmetic, assemble

    path, key = calibration_file(None), this_machine(find_cluster(ClusterConfig(), LaunchConfig()))
    assert path is not None
    known = read_calibration(path, key)
    value = assemble(arithmetic(), found) if known is None else replace(known, **found)
    write_calibration(path, key, value)
    print(f"stored in {path}", flush=True)


# ------------------------------------------------------------------ starting, table


def on_this_machine(ranks: int, timeout: float) -> str:
    """Output of rank 0 of some ranks over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if os.path.exists("/sys/class/net/lo"):
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        output, _ = processes[0].communicate(timeout=timeout)
        if any(p.wait(20) for p in processes):
            raise SystemExit("a rank failed; its message is above")
        return output
    finally:
        for process in processes:
            process.kill()


def in_emulated_nodes(options: argparse.Namespace) -> str:
    """Output of rank 0 of ranks in emulated nodes."""
    from partita.runtime.emulation import Network, unavailable

    if unavailable():
        raise SystemExit(f"no emulated network here: {unavailable()}")
    with Network(options.nodes, options.rate) as network:
        ended = network.run([sys.executable, __file__, *sys.argv[1:]], options.ranks[0], options.timeout)
    if any(e.status for e in ended):
        raise SystemExit("\n".join(f"rank {e.rank} ({e.status}):\n{e.output[-3000:]}" for e in ended if e.status))
    return ended[0].output


def report(output: str) -> None:
    """Table of one set of ranks."""
    for line in output.splitlines():
        if not line.startswith("FOUND "):
            print(line)
            continue
        found = json.loads(line[6:])
        print(f"{found['world']} ranks")
        by_size: dict[int, dict[str, float]] = {}
        for row in found["rows"]:
            by_size.setdefault(row["elements"], {})[row["way"]] = row["seconds"]
        for elements, ways in by_size.items():
            print(f"  {elements * 4 / 2**20:g} MiB")
            for way, seconds in ways.items():
                theirs = ways["gloo " + way.removeprefix("gloo ").removesuffix(" int8")]
                print(f"    {way:22} {seconds * 1e3:9.3f} ms   {theirs / seconds:5.2f} x gloo's speed")
        for level in ("intra", "inter"):
            if found["links"].get(level):
                beta, alpha = found["links"][level]
                print(f"  {level}: beta {beta / 1e6:.4g} MB/s of each rank, alpha {alpha * 1e6:.4g} us a hop")


def main() -> None:
    """Measure what is asked for, or, where torchrun or Slurm has started this, one rank's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks (of each node)")
    parser.add_argument("--nodes", type=int, default=1, help="emulated nodes")
    parser.add_argument("--rate", type=float, help="bytes/s that an emulated node can send")
    parser.add_argument("--store", action="store_true", help="keep alpha and beta for plans")
    parser.add_argument("--links-only", action="store_true", help="alpha and beta only")
    parser.add_argument("--timeout", type=float, default=200.0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return
    outputs = [in_emulated_nodes(options)] if options.nodes > 1 else [on_this_machine(n, options.timeout) for n in options.ranks]
    for output in outputs:
        report(output)


if __name__ == "__main__":
    main()
