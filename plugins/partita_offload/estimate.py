"""What crosses to a tier and back in one step, and how long that takes."""

from __future__ import annotations

from partita.plan.draft import PlanDraft
from partita.plan.plan import Plan
from partita.plugin.markers import hookimpl
from partita.plugin.types import Cost

# Bytes/s of a node's memory while its cores update states there: 10 billion parameters take 2.57 s, at 28 bytes each (Ren et al.
# 2021, ZeRO-Offload, table 4).
HOST_UPDATE = 110e9


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """Bytes by state: what is read is written again, weights are read for each pass. States are updated where they are."""
    states = draft.state_bytes(plan)
    passes = {"parameters": 2 * plan.schedule.micro_batches + 1, "gradients": 2, "optimizer": 2}
    ranks = max(1, plan.layout.world // draft.cluster.nodes)
    costs = []
    for state, times in passes.items():
        tier = getattr(plan.tiers, state)
        if tier.place == "accelerator":
            continue
        moved = int(states.get(state, 0) * tier.fraction) * times
        seconds = _seconds(draft, state, tier.place, moved, ranks)
        # weights and gradients travel beside the arithmetic; the update waits for all of them
        overlap = 0.0 if state == "optimizer" else 1.0 if state == "parameters" else 2 / 3
        costs.append(
            Cost("communication", f"{state} to and from {tier.place}", moved, tier.place, seconds=seconds, overlap=overlap)
        )
    if plan.tiers.optimizer.place != "accelerator" and plan.tiers.parameters.place == "accelerator":
        costs.append(_weights_back(plan, draft, states["parameters"]))
    return costs


def _weights_back(plan: Plan, draft: PlanDraft, size: int) -> Cost:
    """Updated weights come back to the device."""
    moved = int(size * plan.tiers.optimizer.fraction)
    seconds = moved / draft.cluster.host_bandwidth if draft.cluster.host_bandwidth else 0.0
    return Cost("communication", "updated weights from the host", moved, "host", seconds=seconds)


def _seconds(draft: PlanDraft, state: str, place: str, moved: int, ranks: int) -> float:
    cluster = draft.cluster
    if place == "file":
        return moved * ranks / cluster.file_bandwidth if cluster.file_bandwidth else 0.0
    if state == "optimizer":
        bandwidth = HOST_UPDATE if cluster.accelerator else cluster.memory_bandwidth
        return moved * ranks / bandwidth if bandwidth else 0.0
    return moved / cluster.host_bandwidth if cluster.host_bandwidth else 0.0
