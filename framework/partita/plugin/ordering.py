"""The order of model transforms: what they say of each other, then the usual anchors, then their names."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

from partita.errors import PluginError
from partita.plugin.types import Transform
from partita.plugin.wording import complaint

# Where things usually happen to a model, in order; each exists as a place even where no transform has its name.
ANCHORS = ("stage_split", "tensor_parallel", "expert_parallel", "adapter", "recompute", "compile", "state")

# (earlier, later) -> who says so
Edges = dict[tuple[str, str], str]


def sort_transforms(transforms: Sequence[Transform], owners: Mapping[str, str] | None = None) -> list[Transform]:
    """Transforms in an order that keeps every `after` and `before`, the same for any order of `transforms`.

    Free choices go by the anchors (a transform that names none stands where `adapter` does) and by name. owners: transform ->
    plug-in, for messages. Raises PluginError for two transforms of one name and for wishes that contradict each other.
    """
    owners = owners or {}
    _refuse_twins(transforms)
    by_name = {t.name: t for t in transforms}
    edges = _edges(by_name, owners)
    places = _places(set(by_name) | set(ANCHORS), edges)
    return [by_name[name] for name in _sorted(places, edges) if name in by_name]


def _refuse_twins(transforms: Sequence[Transform]) -> None:
    seen: set[str] = set()
    for t in transforms:
        if t.name in seen:
            raise PluginError(
                complaint(
                    f"two transforms have the name {t.name!r}", "rename one of them, or block its plug-in with plugins.block"
                )
            )
        seen.add(t.name)


def _edges(by_name: Mapping[str, Transform], owners: Mapping[str, str]) -> Edges:
    """All pairs that are ordered. A name that is neither a transform nor an anchor counts for nothing: it isn't installed."""
    edges: Edges = dict.fromkeys(pairwise(ANCHORS), "the usual order")
    known = set(by_name) | set(ANCHORS)
    for name in sorted(by_name):
        who = f"plug-in {owners[name]!r}" if name in owners else f"transform {name!r}"
        pairs = [(other, name) for other in by_name[name].after] + [(name, other) for other in by_name[name].before]
        for pair in pairs:
            if set(pair) <= known:
                edges.setdefault(pair, who)
    return edges


def _places(names: set[str], edges: Edges) -> dict[str, float]:
    """A place on the line of anchors for each name: behind the last that must come before it, else before the first after it."""
    earlier = _reach(names, [(b, a) for a, b in edges])
    later = _reach(names, list(edges))
    rank = {anchor: float(i) for i, anchor in enumerate(ANCHORS)}

    def place(name: str) -> float:
        if name in rank:
            return rank[name]
        before = [rank[n] for n in earlier[name] if n in rank]
        behind = [rank[n] for n in later[name] if n in rank]
        if before:
            return max(before) + 0.5
        return min(behind) - 0.5 if behind else rank["adapter"] + 0.5

    return {name: place(name) for name in names}


def _reach(names: set[str], edges: Sequence[tuple[str, str]]) -> dict[str, set[str]]:
    """All names that can be reached from each along the edges."""
    direct: dict[str, set[str]] = {name: set() for name in names}
    for start, end in edges:
        direct[start].add(end)
    reach: dict[str, set[str]] = {}
    for name in names:
        found: set[str] = set()
        todo = list(direct[name])
        while todo:
            current = todo.pop()
            if current not in found:
                found.add(current)
                todo.extend(direct[current])
        reach[name] = found
    return reach


def _sorted(places: Mapping[str, float], edges: Edges) -> list[str]:
    """Kahn's algorithm; of the names that are free, the one with the first place, then name, goes next."""
    waits = {name: {a for a, b in edges if b == name} for name in places}
    free = [(places[name], name) for name in places if not waits[name]]
    heapq.heapify(free)
    order: list[str] = []
    while free:
        _, name = heapq.heappop(free)
        order.append(name)
        for other in [b for a, b in edges if a == name]:
            waits[other].discard(name)
            if not waits[other]:
                heapq.heappush(free, (places[other], other))
    left = set(places) - set(order)
    if left:
        raise PluginError(_cycle_message(left, edges))
    return order


def _cycle_message(left: set[str], edges: Edges) -> str:
    """One contradiction among the names that could not be ordered, with everyone who has a part in it."""
    cycle = _find_cycle(left, edges)
    steps = [f"{a} before {b} ({edges[a, b]})" for a, b in pairwise(cycle)]
    return (
        f"transforms can't be ordered: {'; '.join(steps)}\n"
        "    -> take back one of these `after`/`before`, or leave one of the plug-ins out with plugins.block"
    )


def _find_cycle(left: set[str], edges: Edges) -> list[str]:
    """A shortest closed walk, first name repeated at its end; the same for the same edges."""
    following = {n: sorted(b for a, b in edges if a == n and b in left) for n in left}
    shortest: list[str] = []
    for start in sorted(left):
        paths = [[start]]
        seen: set[str] = set()
        while paths:
            path = paths.pop(0)
            for name in following[path[-1]]:
                if name == start and (not shortest or len(path) + 1 < len(shortest)):
                    shortest = [*path, start]
                elif name not in seen and name != start:
                    seen.add(name)
                    paths.append([*path, name])
    return shortest
