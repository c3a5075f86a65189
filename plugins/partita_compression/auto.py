"""`compression=auto`: what there is to choose from on a network like this one. The planner compares the plans."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from partita.plan.cluster import Cluster
from partita.plan.draft import PlanDraft
from partita.plan.plan import GRADIENT_AXES, Plan
from partita.plugin.markers import hookimpl
from partita.plugin.types import Choices, Cost

KEYS = {
    "gradient_reduce": ("native", "bfloat16", "int8"),
    "parameter_gather": ("native", "int8"),
    "algorithm": ("flat", "hierarchical"),
}
WORTH = 2.0  # times that links between nodes must be slower than those in a node before anything but native and flat is looked at
PACK, UNPACK = 6, 10  # bytes of memory that an element costs when it is packed, and when it is unpacked and added


@hookimpl
def partita_choices(draft: PlanDraft) -> Choices | None:
    """The ways to fill in formats and algorithm that are `auto`: those that lose nothing, and where the network is slow the others."""
    config = draft.config.compression
    asked = {name: getattr(config, name) for name in KEYS}
    if "auto" not in asked.values():
        return None
    known = {name: _options(name, draft.cluster) if value == "auto" else (value,) for name, value in asked.items()}
    open_ = [name for name, value in asked.items() if value == "auto"]
    settings: list[Mapping[str, Any]] = []
    for values in product(*(known[name] for name in open_)):
        settings.append({f"compression.{name}": value for name, value in zip(open_, values, strict=True)})
    return Choices(tuple(settings))


def _options(name: str, cluster: Cluster) -> tuple[str, ...]:
    return KEYS[name] if slow(cluster) else KEYS[name][:1]


def slow(cluster: Cluster) -> bool:
    """Whether links between nodes are much slower than those inside one. On accelerators the backend has levels of its own."""
    if cluster.nodes == 1 or cluster.inter_bandwidth is None:
        return False
    return cluster.intra_bandwidth is None or cluster.intra_bandwidth > WORTH * cluster.inter_bandwidth


def packing(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """Seconds of packing and unpacking, as fast as memory is."""
    rate, layout, wires = draft.cluster.rates.memory, plan.layout, plan.collectives
    if not rate or wires.provider != "compressed":
        return []
    share = layout.pipeline * layout.tensor
    numel, repeats = draft.model.trainable / share, plan.schedule.micro_batches
    touched = 0.0
    if wires.gradient_reduce.format not in ("native", "bfloat16", "float16") and layout.size(GRADIENT_AXES) > 1:
        touched += numel * (PACK + UNPACK) * (repeats if plan.placement.gradients else 1)
    if wires.parameter_gather.format != "native":
        touched += numel * PACK * (2 * repeats if plan.placement.parameters else 1)
    spent = touched / rate / draft.cluster.share(layout.world)
    return [Cost("compute", "packing for the wire", 0, "", spent, overlap=0.0)] if spent else []
