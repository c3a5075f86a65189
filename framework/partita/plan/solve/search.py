"""Compares plans: branch and bound over layouts by a lower bound of their time, with what fits in memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from partita.plan.check import USABLE, abilities, check_capabilities
from partita.plan.draft import PlanDraft
from partita.plan.estimate import estimate_plan, memory_total
from partita.plan.plan import AXES, Plan
from partita.plan.problems import Problem
from partita.plan.solve.options import Option, Space
from partita.plan.work import compute_costs, step_seconds, waiting_cost
from partita.plugin.types import Cost

KEPT = 24  # best plans that are remembered
# Of plans that differ by less than this share for each feature in use, the simpler one is taken: predictions are not that good.
SIMPLE = 0.005
LOSSY = 10  # features that a wire counts for which changes numbers: it must save some 5 % of the step


@dataclass(frozen=True)
class Candidate:
    """A plan that could be taken: predicted seconds of a step (a lower bound where it does not fit), bytes of the fullest rank."""

    option: Option
    plan: Plan
    seconds: float
    need: int

    @property
    def rank(self) -> float:
        """What candidates are sorted by."""
        return self.seconds * (1 + SIMPLE * features(self.plan))

    @property
    def signature(self) -> tuple[Any, ...]:
        """What it is made of, without the numbers: plans that are alike are refused alike."""
        axes = tuple(a for a in AXES if getattr(self.plan.layout, a) > 1)
        return (axes, self.plan.schedule.name, self.plan.placement, self.plan.tiers, self.plan.activations.default)


def features(plan: Plan) -> int:
    """How many things besides plain data parallelism a plan uses."""
    layout, tiers = plan.layout, plan.tiers
    away = sum(getattr(tiers, s).place != "accelerator" for s in ("parameters", "gradients", "optimizer", "activations"))
    inner = sum(getattr(layout, a) > 1 for a in ("pipeline", "replicate", "context", "tensor", "expert"))
    cut = sum(bool(getattr(plan.placement, s)) for s in ("parameters", "gradients", "optimizer"))
    wires = (plan.collectives.gradient_reduce, plan.collectives.parameter_gather)
    lossy = sum(LOSSY for wire in wires if wire.format != "native")
    levels = plan.collectives.gradient_reduce.algorithm != "flat"
    return (
        inner + away + cut + lossy + levels + (plan.activations.default != "keep") + (plan.schedule.name not in ("none", "1f1b"))
    )


@dataclass
class Found:
    """What a search came to. best: by rank. smallest: least memory. refused: fast by bound, but too large, with what they need."""

    best: list[Candidate] = field(default_factory=list)
    smallest: Candidate | None = None
    refused: list[Candidate] = field(default_factory=list)
    impossible: dict[str, int] = field(default_factory=dict)  # reason -> layouts
    compared: int = 0
    layouts: int = 0


class Search:
    """One search. banned: signatures that are not looked at."""

    def __init__(self, space: Space, draft: PlanDraft, banned: Iterable[Any] = ()) -> None:
        self.space, self.draft, self.banned = space, draft, frozenset(banned)
        self.found = Found()
        self._heap: list[tuple[float, int, Candidate]] = []
        self._count = 0

    def run(self) -> Found:
        """Compare. States go to other tiers only where nothing fits without: that is never faster."""
        wide = self._possible(self.space.wide, [self.space.wide_plugin] if self.space.wide_plugin else [])
        rest = self._possible(self.space.rest(), list(self.space.others))
        self.found.layouts = len(wide)
        for level in sorted({_away(o) for o in rest}):
            here = [o for o in rest if _away(o) == level]
            if here:
                self._level(wide, here)
            if self._heap:
                break
        self.found.best = sorted((c for _, _, c in self._heap), key=lambda c: c.rank)
        self.found.refused.sort(key=lambda c: c.rank)
        return self.found

    def _possible(self, options: Iterable[Option], plugins: list[str]) -> list[Option]:
        """Options that this version can carry out and their own plug-ins accept."""
        kept, able = [], abilities(self.space.registry)
        verdicts: dict[Any, tuple[Problem, ...]] = {}
        for option in sorted(options, key=lambda o: o.sections["layout"].pipeline if "layout" in o.sections else 1):
            problems = option.problems or check_capabilities(option.plan(), able)
            if not problems:
                # one of those that cut each block alike is checked for all of them, the shortest pipeline first: checks can be slow,
                # and the winner is checked in full
                kind = _blocks_cut(option)
                if kind is None or kind not in verdicts:
                    verdicts[kind] = self.space.checked(option, plugins)
                problems = verdicts[kind]
            if not problems:
                kept.append(option)
                continue
            reason = f"{problems[0].key}: {problems[0].reason}"
            self.found.impossible[reason] = self.found.impossible.get(reason, 0) + 1
        return kept

    def _level(self, wide: list[Option], rest: list[Option]) -> None:
        lightest = min(rest, key=_recompute)
        base = self.space.base
        splits = len({o.sections["layout"].replicate > 1 for o in wide if "layout" in o.sections}) > 1
        bounded = []
        for option in wide:
            plan = (base + option + lightest).plan()
            bounded.append((self._bound(plan), option))
        for bound, option in sorted(bounded, key=lambda b: b[0]):
            if len(self._heap) >= KEPT and bound >= -self._heap[0][0]:
                break
            for other in rest:
                if not _pointless(option, other, splits):
                    self._compare(base + option + other, bound)

    def _bound(self, plan: Plan) -> float:
        """Arithmetic, and what each micro-batch waits for: no placement makes less of it."""
        costs = [c for c in self._added(plan) if c.repeated and not c.overlap]
        costs += compute_costs(self.draft, plan, update=False)
        return step_seconds([*costs, *waiting_cost(self.draft, plan, costs)], self.draft.cluster.accelerator)

    def _added(self, plan: Plan) -> list[Cost]:
        return self.space.registry.estimate(plan, self.draft)

    def _compare(self, option: Option, bound: float) -> None:
        plan = option.plan()
        costs = estimate_plan(self.draft, plan, self._added(plan))
        self.found.compared += 1
        need = memory_total(costs)
        self._count += 1
        if not self._fits(plan, costs, need):
            candidate = Candidate(option, plan, bound, need)
            self._too_large(candidate)
        else:
            seconds = step_seconds(costs, self.draft.cluster.accelerator)
            candidate = Candidate(option, plan, seconds, need)
            if candidate.signature in self.banned:
                return
            entry = (-candidate.rank, self._count, candidate)
            if len(self._heap) < KEPT:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heappushpop(self._heap, entry)
        if self.found.smallest is None or need < self.found.smallest.need:
            self.found.smallest = candidate

    def _fits(self, plan: Plan, costs: list[Cost], need: int) -> bool:
        cluster, world = self.draft.cluster, plan.layout.world
        capacity = cluster.capacity(world)
        if capacity is not None and need > capacity * USABLE:
            return False
        away = memory_total(costs, "host") * max(1, world // cluster.nodes)
        return not away or cluster.host_memory is None or away <= cluster.host_memory * USABLE

    def _too_large(self, candidate: Candidate) -> None:
        """Remember a few of the fastest by bound, one for each layout."""
        key = candidate.plan.layout
        same = next((i for i, c in enumerate(self.found.refused) if c.plan.layout == key), None)
        if same is not None:
            if candidate.need < self.found.refused[same].need:
                self.found.refused[same] = candidate
        elif len(self.found.refused) < KEPT:
            self.found.refused.append(candidate)


def _blocks_cut(option: Option) -> Any:
    """How a layout cuts each block; None where an option has no layout, or for those that say more."""
    layout = option.sections.get("layout")
    return None if layout is None else (layout.tensor, layout.context, layout.expert, layout.sequence_parallel)


def _away(option: Option) -> int:
    tiers = option.sections.get("tiers")
    if tiers is None:
        return 0
    places = [getattr(tiers, s) for s in ("parameters", "gradients", "optimizer", "activations")]
    return sum({"accelerator": 0, "host": 1}.get(t.place, 3) for t in places)


def _recompute(option: Option) -> int:
    activations = option.sections.get("activations")
    return {"keep": 0, "selective": 1}.get(activations.default, 2) if activations else 0


def _pointless(wide: Option, rest: Option, splits: bool) -> bool:
    """Whether another combination means the same: groups that no state is cut by, placements that the layout makes one.

    splits: whether there are layouts with and without groups.
    """
    layout, placement = wide.sections.get("layout"), rest.sections.get("placement")
    if layout is None or placement is None:
        return False
    cuts = [getattr(placement, s) for s in ("parameters", "gradients", "optimizer")]
    if layout.data == 1:
        return any(cuts)
    in_groups = any(len(c) == 1 for c in cuts)
    return splits and in_groups != (layout.replicate > 1)
