"""The machine that a plan is made for: found here, or described in config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.errors import ConfigError, did_you_mean
from partita.plan import rates as reached
from partita.plan.calibration import calibration_file, machine_key, read_calibration
from partita.plan.devices import DEVICES, HOP_INTER, HOP_INTRA, DeviceSpec, device_row
from partita.plan.plan import AXES, Layout
from partita.plan.rates import Rates

# fields that a config may write out, all numbers
WRITTEN = (
    "memory",
    "host_memory",
    "intra_bandwidth",
    "inter_bandwidth",
    "intra_latency",
    "inter_latency",
    "memory_bandwidth",
    "host_bandwidth",
    "file_bandwidth",
)


@dataclass(frozen=True)
class Cluster:
    """nodes x devices_per_node devices.

    device: row of the device table, or what the driver reports. memory: bytes of one device; None on a CPU, where ranks share
    host_memory (bytes of one node). flops: peak FLOP/s of one device by compute dtype, empty when unknown. Bandwidths: bytes/s of
    one device, one direction: inside a node, between nodes, to its own memory, to the host's; file: of one node. Latencies: seconds
    of one hop. link_ranks: ranks of a node that the links' rates are for, where ranks share its cores. rates: what one device reaches, or all cores of a node together (partita.plan.rates).
    ranks: processes; None means flexible: as many as the layout asks for. ranks_from: where that number comes from.
    """

    nodes: int = 1
    devices_per_node: int = 1
    device: str = "cpu"
    accelerator: bool = False
    memory: float | None = None
    host_memory: float | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    intra_latency: float = 0.0
    inter_latency: float = 0.0
    memory_bandwidth: float | None = None
    host_bandwidth: float | None = None
    file_bandwidth: float | None = None
    ranks: int | None = None
    ranks_from: str = ""
    cores: int = 1
    described: bool = False
    link_ranks: int = 1
    rates: Rates = field(default_factory=Rates)

    def share(self, world: int) -> float:
        """Share of `rates` that one of `world` ranks gets while all of them work: CPU ranks of a node share its cores."""
        return 1.0 if self.accelerator else 1 / max(1, -(-world // self.nodes))

    def link(self, layout: Layout, axes: tuple[str, ...]) -> str:
        """`intra` if ranks that differ only along `axes` share a node, else `inter`. Inner axes are neighbours in a node."""
        stride, reach = 1, 1
        for axis in reversed(AXES):
            stride *= getattr(layout, axis)
            if axis in axes and getattr(layout, axis) > 1:
                reach = stride
        return "intra" if self.nodes == 1 or reach <= self.devices_per_node else "inter"

    def bandwidth(self, link: str) -> float | None:
        """Bytes/s of a rank on `intra` or `inter`, where known."""
        return self.intra_bandwidth if link == "intra" else self.inter_bandwidth

    def capacity(self, world: int) -> float | None:
        """Bytes that one rank may fill: of its device, or its share of the node's memory where it computes on the CPU."""
        if self.accelerator:
            return self.memory
        if self.host_memory is None:
            return None
        return self.host_memory / max(1, -(-world // self.nodes))

    def words(self) -> str:
        """For the head of the plan table."""
        if not self.accelerator and not self.described:
            return f"this machine: {self.cores} CPU cores" if self.nodes == 1 else f"{self.nodes} nodes of {self.cores} CPU cores"
        where = "described" if self.described else "this machine"
        return f"{where}: {self.nodes} x {self.devices_per_node} {self.device}"


def find_cluster(config: Any, launch: Any) -> Cluster:
    """The cluster of the node `cluster`, filled up with what is found here or with the device table.

    Raises ConfigError for a device that the table does not have and that is not described either.
    """
    described = any(getattr(config, name) is not None for name in ("nodes", "devices_per_node", "device"))
    base = _describe(config) if described else _spread(_measured(_find(), config.calibration), os.environ)
    ranks, source = _ranks(base, launch)
    values: dict[str, Any] = {name: getattr(config, name) for name in WRITTEN if getattr(config, name) is not None}
    if config.flops is not None:
        values["flops"] = {"bfloat16": config.flops, "float16": config.flops}
        values["rates"] = reached.tabled(values["flops"], base.memory_bandwidth)
    if config.memory_bandwidth is not None:
        values["rates"] = replace(values.get("rates", base.rates), memory=config.memory_bandwidth * reached.MEMORY_SHARE)
    return replace(base, **values, ranks=ranks, ranks_from=source)


def this_machine(cluster: Cluster) -> str:
    """Under which name its measurements are kept."""
    return machine_key(cluster.device, cluster.cores, cluster.devices_per_node if cluster.accelerator else 1)


def _spread(here: Cluster, environment: Mapping[str, str]) -> Cluster:
    """This machine as one of the nodes over which a launcher has spread its ranks; nodes with unlike numbers of ranks count as one."""
    joined = joined_ranks(environment)
    near = joined_ranks_here(environment)
    if joined is None or not near or joined[0] <= near or joined[0] % near:
        return here
    nodes = joined[0] // near
    if int(environment.get("GROUP_WORLD_SIZE", nodes)) != nodes:
        return here
    return replace(here, nodes=nodes, devices_per_node=near)


def _measured(here: Cluster, configured: str) -> Cluster:
    """This machine with measured rates in place of tabled ones, where there are any."""
    found = read_calibration(calibration_file(configured), this_machine(here))
    if found is None:
        return here
    links: dict[str, Any] = {}
    for level in ("intra", "inter"):
        link = getattr(found, level) or (found.intra if level == "inter" and not here.accelerator else None)
        if link:
            links |= {f"{level}_bandwidth": link[0], f"{level}_latency": link[1]}
    rates = Rates(found.flops, found.memory, found.overhead, f"measured here, {found.when}", measured=True)
    return replace(here, **links, rates=rates, host_bandwidth=found.host or here.host_bandwidth, link_ranks=found.ranks)


def _describe(config: Any) -> Cluster:
    """A cluster that need not be there."""
    here = _find()
    name = config.device or (
        here.device if here.accelerator else "h100" if (config.nodes or 1) * (config.devices_per_node or 1) > 1 else "cpu"
    )
    row = name if name in DEVICES else device_row(name)
    if row is None and config.memory is None:
        known = did_you_mean(name, DEVICES)
        raise ConfigError(
            f"cluster.device: {name!r} is not in the device table.\n    -> {known} Or give cluster.memory (bytes of one device)."
        )
    spec = DEVICES[row] if row else DEVICES["cpu"]
    is_cpu = row == "cpu"
    return Cluster(
        nodes=config.nodes or 1,
        devices_per_node=config.devices_per_node or spec.per_node,
        device=name,
        accelerator=not is_cpu,
        memory=spec.memory,
        host_memory=spec.host_memory or (here.host_memory if is_cpu else None),
        cores=here.cores,
        described=True,
        **(_cpu(here.cores) if is_cpu else _accelerator(spec)),
    )


def _accelerator(spec: DeviceSpec) -> dict[str, Any]:
    """Rates of a row of the table; of links, the share that collectives reach."""
    return {
        "flops": dict(spec.flops),
        "intra_bandwidth": spec.intra and spec.intra * reached.LINK_SHARE,
        "inter_bandwidth": spec.inter and spec.inter * reached.LINK_SHARE,
        "intra_latency": HOP_INTRA,
        "inter_latency": HOP_INTER,
        "memory_bandwidth": spec.memory_bandwidth,
        "host_bandwidth": spec.host and spec.host * reached.LINK_SHARE,
        "rates": reached.tabled(spec.flops, spec.memory_bandwidth),
    }


def _cpu(cores: int) -> dict[str, Any]:
    """Guesses for a machine without accelerators, until it is measured."""
    bandwidth, latency = reached.LOOPBACK
    return {
        "intra_bandwidth": bandwidth,
        "inter_bandwidth": bandwidth,
        "intra_latency": latency,
        "inter_latency": latency,
        "memory_bandwidth": reached.HOST_MEMORY,
        "link_ranks": max(2, cores),
        "rates": reached.guessed(cores),
    }


def _find() -> Cluster:
    """This machine, through torch.accelerator and the operating system."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    host = Cluster(cores=cores, host_memory=host_memory(), **_cpu(cores))
    if not torch.accelerator.is_available():
        return host
    kind = torch.accelerator.current_accelerator()
    module = getattr(torch, kind.type if kind is not None else "cpu")
    count = torch.accelerator.device_count()
    properties = module.get_device_properties(0) if hasattr(module, "get_device_properties") else None
    reported = getattr(properties, "name", kind.type if kind is not None else "accelerator")
    row = DEVICES[device_row(reported) or "cpu"]
    return Cluster(
        devices_per_node=count,
        device=device_row(reported) or reported,
        accelerator=True,
        memory=getattr(properties, "total_memory", None) or row.memory,
        host_memory=host.host_memory,
        cores=cores,
        **_accelerator(row),
    )


def _ranks(base: Cluster, launch: Any) -> tuple[int | None, str]:
    """Number of processes and where it comes from. A launcher that started us wins, then launch.ranks, then the accelerators."""
    joined = None if base.described else joined_ranks(os.environ)
    if joined is not None:
        return joined
    if launch.ranks != "auto":
        if isinstance(launch.ranks, int) and launch.ranks >= 1:
            return launch.ranks, "launch.ranks"
        raise ConfigError(
            f"launch.ranks: {launch.ranks!r} is no positive whole number.\n    -> Give a count of at least 1, or auto."
        )
    if base.accelerator or base.described:
        source = "cluster" if base.described else f"{base.devices_per_node} accelerators found"
        return base.nodes * base.devices_per_node, source
    return None, ""


def joined_ranks(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """The world size, where torchrun or Slurm has started this process as one rank of several."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"]), "WORLD_SIZE"
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return int(environment["SLURM_STEP_NUM_TASKS"]), "Slurm"
    return None


def joined_ranks_here(environment: Mapping[str, str]) -> int | None:
    """Ranks of this node, where the launcher tells."""
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment["LOCAL_WORLD_SIZE"])
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
        tasks = int(environment["SLURM_STEP_NUM_TASKS"])
        return tasks // nodes if tasks % nodes == 0 else None
    return None


def host_memory() -> float | None:
    """Bytes that this process may use: the machine's memory, or the limit of its control group where that is lower."""
    try:
        total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return None  # not a POSIX system
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(limit_file)
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            total = min(total, float(text))
    return total
