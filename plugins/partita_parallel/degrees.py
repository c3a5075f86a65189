"""Solves the degrees of the mesh: how many ranks lie along each axis, given what the user fixed and how many ranks there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from partita.plan.cluster import Cluster
from partita.plan.plan import Layout
from partita.plan.problems import Problem

INNER = ("pipeline", "context", "tensor")


@dataclass
class Degrees:
    """What the user asked for, `None` standing for auto, and the problems met on the way.

    shard_hint: ranks of a shard group that another node asks for: a count, `node`, or None. experts: in a layer of the model, or 0.
    """

    asked: dict[str, int | None]
    shard_hint: int | str | None
    global_batch: int | str
    problems: list[Problem] = field(default_factory=list)
    experts: int = 0

    def solve(self, cluster: Cluster) -> Layout:
        """The layout. Where numbers contradict each other the problems say so, and the layout can still be shown."""
        inner = {axis: self.asked[axis] or 1 for axis in INNER}
        others = math.prod(inner.values())
        data = self._data(cluster, others)
        shard = self._expert_shard(data) or self._shard(cluster, data, others)
        replicate = self.asked["replicate"] or max(1, data // shard)
        self._compare(data, replicate, shard)
        expert = self._expert(data, shard)
        layout = Layout(inner["pipeline"], replicate, shard, inner["context"], inner["tensor"], expert)
        self._count(layout, cluster)
        return layout

    def _expert_shard(self, data: int) -> int | None:
        """The expert axis folds over `shard`, so that has its degree; with `auto` as many ranks as share the experts evenly."""
        asked = self.asked["expert"]
        if self.asked["shard"] or self.asked["replicate"] or asked == 1:
            return None
        if asked is None:
            return math.gcd(data, self.experts) if self.experts else None
        return asked if data % asked == 0 else None

    def _expert(self, data: int, shard: int) -> int:
        asked = self.asked["expert"]
        if asked is None:
            return shard if self.experts and self.experts % shard == 0 else 1
        if asked > 1 and data % asked == 0 and asked != shard:
            reason = f"{asked} expert ranks fold over parallel.shard, which is {shard}."
            self.problems.append(Problem("parallel.expert", reason, f"Set parallel.shard={asked}, or leave it on auto."))
        return asked

    def _data(self, cluster: Cluster, others: int) -> int:
        replicate, shard = self.asked["replicate"], self.asked["shard"]
        if self.asked["data"]:
            return self.asked["data"]
        if replicate and shard:
            return replicate * shard
        if cluster.ranks is not None:
            if cluster.ranks % others:
                reason = f"{cluster.ranks} ranks can't be divided by pipeline x context x tensor = {others}."
                self.problems.append(
                    Problem("parallel.data", reason, _divisors_text("pipeline x context x tensor", cluster.ranks))
                )
            return max(1, cluster.ranks // others)
        return self._data_of_flexible(cluster, replicate, shard)

    def _data_of_flexible(self, cluster: Cluster, replicate: int | None, shard: int | None) -> int:
        """Without accelerators there are as many ranks as the layout asks for: two where the cores and the batch allow it."""
        if replicate or shard:
            return (replicate or 1) * (shard or self._hint(cluster, 1) or 1)
        hint = self._hint(cluster, 1)
        if isinstance(self.shard_hint, int) and hint:
            return 2 * hint  # a group size makes sense only with more than one group
        even = not isinstance(self.global_batch, int) or self.global_batch % 2 == 0
        return 2 if cluster.cores >= 2 and even else 1

    def _shard(self, cluster: Cluster, data: int, others: int) -> int:
        if self.asked["shard"]:
            return self.asked["shard"]
        if self.asked["replicate"]:
            return max(1, data // self.asked["replicate"])
        hint = self._hint(cluster, others)
        if not hint:
            return data
        if isinstance(self.shard_hint, str):
            return math.gcd(data, hint)
        if data % hint:
            reason = f"{data} data ranks can't be cut into groups of {hint}."
            self.problems.append(Problem("zero.shard_size", reason, _divisors_text("zero.shard_size", data)))
            return data
        return hint

    def _hint(self, cluster: Cluster, others: int) -> int | None:
        if self.shard_hint == "node":
            return max(1, cluster.devices_per_node // others)
        return self.shard_hint if isinstance(self.shard_hint, int) and self.shard_hint > 0 else None

    def _compare(self, data: int, replicate: int, shard: int) -> None:
        if replicate * shard != data:
            reason = f"data = replicate x shard does not hold: {data} != {replicate} x {shard}."
            remedy = f"Set parallel.data={replicate * shard}, or leave one of parallel.data, .replicate and .shard on auto."
            self.problems.append(Problem("parallel.data", reason, remedy))
        hint = self.shard_hint
        if isinstance(hint, int) and self.asked["shard"] and hint != shard:
            reason = f"zero.shard_size={hint} and parallel.shard={shard} are two answers to one question."
            self.problems.append(Problem("zero.shard_size", reason, "Drop one of the two."))

    def _count(self, layout: Layout, cluster: Cluster) -> None:
        if cluster.ranks is None or layout.world == cluster.ranks or any(p.key == "parallel.data" for p in self.problems):
            return
        reason = (
            "pipeline x replicate x shard x context x tensor = "
            f"{layout.pipeline} x {layout.replicate} x {layout.shard} x {layout.context} x {layout.tensor} = {layout.world}, "
            f"but there are {cluster.ranks} ranks ({cluster.ranks_from})."
        )
        remedy = f"Leave parallel.data on auto, or set launch.ranks={layout.world}."
        if cluster.accelerator and layout.world > cluster.ranks:
            remedy = "Leave parallel.data on auto, or make the degrees smaller."
        self.problems.append(Problem("parallel.data", reason, remedy))


def _divisors_text(key: str, number: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return f"Legal values of {key}: " + ", ".join(map(str, divisors[:16])) + "."


def read_degrees(config: Any, zero: Any, global_batch: int | str, experts: int = 0) -> Degrees:
    """Degrees from the node `parallel` and, if there is one, the node `zero`. No positive count: a problem, and auto."""
    problems: list[Problem] = []
    asked: dict[str, int | None] = {}
    for axis in ("data", "replicate", "shard", *INNER, "expert"):
        asked[axis] = as_count(f"parallel.{axis}", getattr(config, axis), problems)
    hint = getattr(zero, "shard_size", None)
    if isinstance(hint, str) and hint != "node":
        problems.append(
            Problem("zero.shard_size", f"{hint!r} is neither a count nor `node`.", "Give a number of ranks, or `node`.")
        )
        hint = None
    elif isinstance(hint, int) and hint < 1:
        problems.append(
            Problem("zero.shard_size", f"{hint} ranks make no group.", "Give a positive number of ranks, or drop it.")
        )
        hint = None
    return Degrees(asked, hint, global_batch, problems, experts)


def expert_count(model: Any) -> int:
    """Experts of a layer; 0 where there are none. model: a ModelSpec."""
    return max((p.shape[0] for p in model.parameters if p.experts), default=0)


def as_count(key: str, value: int | str, problems: list[Problem]) -> int | None:
    """A positive int, or None for `auto`. Anything else adds a problem and counts as auto."""
    if value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    problems.append(Problem(key, f"{value!r} is no positive whole number.", "Give a count of at least 1, or auto."))
    return None
