"""All ways to lay ranks out and to work a batch through them, for the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from partita.plan.cluster import Cluster
from partita.plan.draft import PlanDraft
from partita.plugin.markers import hookimpl
from partita.plugin.types import Choices
from partita_parallel.degrees import INNER, as_count, expert_count
from partita_parallel.pipeline_order import FIXED, SCHEDULES

LARGEST_MICRO = 16  # sequences of one pass; more rarely makes a pass faster
LEAST_TOKENS = 1024  # of a rank along `context`; with fewer, messages take longer than attention
STAGES_PER_RANK = (2, 4)  # of the schedules that take any number; more of them wait less and send more
NODES_OF_TENSOR = 1  # tensor groups stay in a node: each layer waits for their messages

Settings = dict[str, Any]


@hookimpl
def partita_choices(draft: PlanDraft) -> Choices | None:
    """Degrees, micro-batches and schedules. Degrees of the data axes alone follow from the number of ranks without the planner."""
    config = draft.config.parallel
    needed = any(getattr(config, key) == "auto" for key in (*INNER, "expert", "sequence_parallel"))
    found = tuple(_ways(draft))
    return Choices(found, needed) if found else None


def _ways(draft: PlanDraft) -> Iterator[Settings]:
    config = draft.config.parallel
    asked = {
        axis: as_count(f"parallel.{axis}", getattr(config, axis), []) for axis in (*INNER, "data", "replicate", "shard", "expert")
    }
    # expert=auto alone shares experts out over all data ranks; where the planner chooses all it may also leave them whole
    experts = expert_count(draft.model) if asked["expert"] is None and config.others == "auto" else 0
    for world in _worlds(draft.cluster, asked):
        for inner in _inner(draft, asked, world):
            data = world // math.prod(inner.values())
            if asked["data"] not in (None, data):
                continue
            choices = product(
                _groups(draft.cluster, asked, inner, data, experts),
                _batches(draft, inner["pipeline"], data),
                _schedules(draft, inner["pipeline"]),
                _between_matrices(draft, inner),
            )
            for groups, batch, schedule, between in choices:
                degrees = {**inner, **groups}
                left_open = {f"parallel.{a}": d for a, d in degrees.items() if getattr(config, a) == "auto"}
                yield {**left_open, **batch, **schedule, **between}


def _worlds(cluster: Cluster, asked: dict[str, int | None]) -> list[int]:
    """Numbers of ranks. Without accelerators as many as there are cores, or as the degrees that are written out ask for."""
    if cluster.ranks is not None:
        return [cluster.ranks]
    least = math.prod(asked[axis] or 1 for axis in INNER) * (asked["data"] or (asked["replicate"] or 1) * (asked["shard"] or 1))
    return sorted({least * n for n in range(1, max(1, cluster.cores // least) + 1)})


def _inner(draft: PlanDraft, asked: dict[str, int | None], world: int) -> Iterator[dict[str, int]]:
    """Degrees of pipeline, context and tensor."""
    cluster, sequence = draft.cluster, draft.config.data.sequence
    near = max(1, cluster.devices_per_node) * NODES_OF_TENSOR if cluster.accelerator else world
    for tensor in _degrees(asked["tensor"], world, near):
        for context in _degrees(asked["context"], world // tensor, max(1, sequence // LEAST_TOKENS)):
            blocks = max(1, len(draft.model.blocks))
            for pipeline in _degrees(asked["pipeline"], world // tensor // context, blocks):
                yield {"pipeline": pipeline, "context": context, "tensor": tensor}


def _degrees(asked: int | None, ranks: int, most: int) -> list[int]:
    """Divisors of the number of ranks, at most `most`; or the one that is written out, where it divides."""
    if asked is not None:
        return [asked] if ranks % asked == 0 else []
    return [d for d in range(1, min(ranks, most) + 1) if ranks % d == 0]


def _groups(
    cluster: Cluster, asked: dict[str, int | None], inner: dict[str, int], data: int, experts: int
) -> Iterator[dict[str, int]]:
    """Degrees of replicate and shard: all data ranks in one group, or a group for each node, or for each share of the experts."""
    node = max(1, cluster.devices_per_node // math.prod((inner["context"], inner["tensor"])))
    for shard in dict.fromkeys((data, math.gcd(data, node), *([math.gcd(data, experts)] if experts else []))):
        replicate = data // shard
        if asked["shard"] not in (None, shard) and asked["shard"] is not None:
            shard, replicate = asked["shard"], data // asked["shard"]
        if asked["replicate"] not in (None, replicate) and asked["replicate"] is not None:
            shard, replicate = data // asked["replicate"], asked["replicate"]
        if shard * replicate == data and not (shard == 1 and replicate > 1 and asked["shard"] is None):
            degrees = {"data": data, "replicate": replicate, "shard": shard}
            yield from _experts(degrees, experts)
        if asked["shard"] is not None or asked["replicate"] is not None:
            return


def _experts(degrees: dict[str, int], experts: int) -> Iterator[dict[str, int]]:
    """Whole on every rank, or shared out over the ranks of a shard group; nothing to say where there are none."""
    if not experts:
        yield degrees
        return
    yield {**degrees, "expert": 1}
    if degrees["shard"] > 1 and experts % degrees["shard"] == 0:
        yield {**degrees, "expert": degrees["shard"]}


def _batches(draft: PlanDraft, pipeline: int, data: int) -> Iterator[Settings]:
    """Sequences of a pass, and passes. A pipeline needs as many passes as stages."""
    train, config = draft.config.train, draft.config.parallel
    micro = as_count("train.micro_batch", train.micro_batch, [])
    count = as_count("parallel.microbatches", config.microbatches, [])
    whole = as_count("train.global_batch", train.global_batch, []) or data * (micro or 1) * (count or 1)
    share, rest = divmod(whole, data)
    if rest or not share:
        return
    sizes = [micro] if micro else [share // count] if count and share % count == 0 else _sizes(share)
    for size in sizes:
        if share % size or share // size < pipeline or (count is not None and size * count != share):
            continue
        settings: Settings = {}
        if micro is None:
            settings["train.micro_batch"] = size
        if count is None:
            settings["parallel.microbatches"] = share // size
        yield settings


def _sizes(share: int) -> list[int]:
    return [d for d in range(1, min(share, LARGEST_MICRO) + 1) if share % d == 0]


def _schedules(draft: PlanDraft, pipeline: int) -> list[Settings]:
    """Orders of work, and the numbers of stages for each rank that an order leaves open."""
    config, blocks = draft.config.parallel, len(draft.model.blocks)
    if config.schedule != "auto" and (config.schedule in FIXED or config.schedule not in SCHEDULES):
        return [{}]
    if pipeline == 1:
        return [{"parallel.schedule": "auto"}] if config.schedule == "auto" else [{}]
    found: list[Settings] = []
    for name in SCHEDULES if config.schedule == "auto" else (config.schedule,):
        named: Settings = {"parallel.schedule": name} if config.schedule == "auto" else {}
        several = name not in FIXED and config.stages_per_rank == "auto"
        each = [n for n in STAGES_PER_RANK if n * pipeline <= blocks] if several else []
        found += [{**named, "parallel.stages_per_rank": n} for n in each] or [named]
    return found


def _between_matrices(draft: PlanDraft, inner: dict[str, int]) -> list[Settings]:
    """Whether what lies between matrices is cut by tokens, where it can be."""
    if draft.config.parallel.sequence_parallel != "auto":
        return [{}]
    whole = draft.config.data.sequence // inner["context"] % inner["tensor"]
    able = inner["tensor"] > 1 and not whole and getattr(draft.model.module, "partita_sequence_parallel", False)
    return [{"parallel.sequence_parallel": way} for way in ((False, True) if able else (False,))]
