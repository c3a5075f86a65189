"""Where ranks stand: which axes stay inside a node, what the first node holds, and what a person should know of it."""

from __future__ import annotations

from collections.abc import Iterator

from partita.plan.cluster import Cluster
from partita.plan.draft import PlanDraft
from partita.plan.links import group_of
from partita.plan.memory import words
from partita.plan.plan import AXES, Layout, Plan
from partita.plugin.types import Cost


def placement_words(cluster: Cluster, layout: Layout) -> str:
    """e.g. `tensor 8 in a node; shard 16, pipeline 8 across nodes; node 0: ranks 0-7 = tensor 0-7`. Innermost axis first."""
    inside, across = [], []
    for axis in reversed(AXES):
        degree = getattr(layout, axis)
        if degree == 1:
            continue
        group = group_of(cluster, layout, (axis,))
        if group.place == "intra":
            inside.append(f"{axis} {degree}")
        else:
            across.append(f"{axis} {degree}" + (f" ({group.near} in a node)" if group.near > 1 else ""))
    parts = [f"{', '.join(inside)} in a node"] * bool(inside) + [f"{', '.join(across)} across nodes"] * bool(across)
    return "; ".join([*parts, _first_node(cluster, layout)])


def _first_node(cluster: Cluster, layout: Layout) -> str:
    """Ranks of node 0 and their coordinates."""
    ranks = min(layout.world, -(-layout.world // cluster.nodes) if not cluster.accelerator else cluster.devices_per_node)
    coordinates, stride = [], 1
    for axis in reversed(AXES):
        degree = getattr(layout, axis)
        last = min(degree, max(1, -(-ranks // stride))) - 1
        if degree > 1:
            coordinates.append(f"{axis} 0-{last}" if last else f"{axis} 0")
        stride *= degree
    return f"node 0: ranks 0-{ranks - 1} = " + " x ".join(reversed(coordinates)) if coordinates else "node 0: rank 0"


def notes(draft: PlanDraft, plan: Plan, costs: list[Cost]) -> Iterator[str]:
    """What is slow or uncertain in a plan that can be run all the same."""
    cluster, layout = draft.cluster, plan.layout
    group = group_of(cluster, layout, ("tensor",))
    if group.place == "inter":
        spent = sum(c.seconds for c in costs if c.category == "communication" and c.repeated and c.place == "inter")
        yield (
            f"parallel.tensor={layout.tensor} reaches over nodes of {cluster.devices_per_node} devices: every layer waits for the "
            f"network, {spent:.3g} s of each step. At most {cluster.devices_per_node} keeps it inside a node."
        )
    if not cluster.rates.measured and not cluster.accelerator:
        yield "seconds rest on guesses of this machine's rates; scripts/calibrate.py measures and stores them."
    if cluster.accelerator and layout.world > 1:
        yield "seconds leave out stragglers, networks shared with other jobs, loading of data and pauses for checkpoints."
    for cost in costs:
        if cost.category == "communication" and cost.bytes and not cost.seconds:
            yield f"nothing says how fast {cost.place} is: {words(cost.bytes)} ({cost.what}) take no time in this estimate."
