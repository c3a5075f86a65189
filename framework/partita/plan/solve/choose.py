"""Chooses: searches, checks the best in full, and says why."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from partita.plan.draft import PlanDraft
from partita.plan.memory import words
from partita.plan.problems import Problem
from partita.plan.solve.describe import plan_words
from partita.plan.solve.options import Space
from partita.plan.solve.search import Candidate, Found, Search

ROUNDS = 6  # searches, each without the kinds of plans that were refused before
PATIENCE = 2  # plans of one kind that are refused before the kind is
SHOWN = 5  # lines of those that were not taken


@dataclass
class Row:
    """A line of the table: a plan, its predicted seconds, and why it was taken or not."""

    plan: str
    seconds: float
    verdict: str


@dataclass
class Choice:
    """What the planner chose, and why.

    settings: config key -> value; the config that is planned has them. rows: the winner first, then those that came near. ranked: the
    best that passed all checks, for trials. compared, layouts: how many plans and layouts were looked at.
    """

    settings: dict[str, Any]
    reason: str
    rows: list[Row] = field(default_factory=list)
    ranked: list[Candidate] = field(default_factory=list)
    compared: int = 0
    layouts: int = 0


Judge = Callable[[dict[str, Any]], list[Problem]]


def choose(draft: PlanDraft, registry: Any, judge: Judge, trials: int = 0) -> Choice | None:
    """Settings for all keys that need the planner, or None where none does.

    judge: all problems of the finished plan with some settings. trials: how many good plans are wanted for measuring. Where every plan
    has problems, the settings of the one that needs least memory come back, so that the problems can be shown.
    """
    ways = registry.choices(draft)
    if not any(w.needed for w in ways.values()):
        return None
    with _uncollected():
        return _chosen(draft, registry, ways, judge, trials)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A search makes many small objects and no cycles: to look through all of them for some again and again is a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _chosen(draft: PlanDraft, registry: Any, ways: Mapping[str, Any], judge: Judge, trials: int) -> Choice:
    if not draft.cluster.rates.flops:
        draft.problem(_unknown_speed(draft))
    space = Space(draft, registry, {name: w.settings for name, w in ways.items()})
    banned: set[Any] = set()
    rows: list[Row] = []
    accepted: list[Candidate] = []
    found = Found()
    compared = 0
    for _ in range(ROUNDS):
        found = Search(space, draft, banned).run()
        compared += found.compared
        accepted += _judged(found, judge, banned, rows, max(1, trials), accepted)
        if accepted or not found.best:
            break
    taken = accepted[0] if accepted else found.smallest
    if taken is None:
        return _nothing(space, found)
    return Choice(
        dict(taken.option.settings),
        _reason(taken, found, bool(accepted), compared),
        _rows(taken, accepted, found, rows),
        accepted,
        compared,
        found.layouts,
    )


def _judged(
    found: Found, judge: Judge, banned: set[Any], rows: list[Row], wanted: int, before: list[Candidate]
) -> list[Candidate]:
    """The first candidates without problems. Kinds that are refused again and again are banned."""
    accepted: list[Candidate] = []
    refused: dict[Any, int] = {}
    for candidate in _spread(found.best) if wanted > 1 else found.best:
        if refused.get(candidate.signature, 0) >= PATIENCE:
            banned.add(candidate.signature)
            continue
        problems = judge(dict(candidate.option.settings))
        if problems:
            refused[candidate.signature] = refused.get(candidate.signature, 0) + 1
            rows.append(Row(plan_words(candidate.plan), candidate.seconds, f"refused: {problems[0].key}: {problems[0].reason}"))
            continue
        accepted.append(candidate)
        if len(accepted) + len(before) >= wanted:
            break
    if not accepted:
        banned |= set(refused)
    return accepted


def _spread(best: list[Candidate]) -> list[Candidate]:
    """For measuring: the best of each layout and placement first, since plans of one kind come close to each other."""
    seen: set[Any] = set()
    first: list[Candidate] = []
    later: list[Candidate] = []
    for candidate in best:
        kind = (candidate.plan.layout, candidate.plan.placement)
        (later if kind in seen else first).append(candidate)
        seen.add(kind)
    return first + later


def _reason(taken: Candidate, found: Found, fits: bool, compared: int) -> str:
    if not fits:
        return f"nothing fits: of {compared} plans this one needs least memory, {words(taken.need)}"
    return f"planner: the fastest of {compared} plans that fit, {taken.seconds:.3g} s a step predicted"


def _rows(taken: Candidate, accepted: list[Candidate], found: Found, refused: list[Row]) -> list[Row]:
    """The winner, then the refused and the slower ones, by time."""
    rows = [Row(plan_words(taken.plan), taken.seconds, "taken" if accepted else "needs least memory")]
    large = [
        Row(plan_words(c.plan), c.seconds, f"at best; needs {words(c.need)} on a device")
        for c in found.refused
        if c.seconds < taken.seconds or not accepted
    ]
    unlike: list[Row] = []
    seen = {_kind(taken)}
    for c in found.best:
        if c.seconds >= taken.seconds and _kind(c) not in seen:
            seen.add(_kind(c))
            unlike.append(Row(plan_words(c.plan), c.seconds, f"{c.seconds / taken.seconds - 1:.1%} slower"))
    faster = sorted([*large[:SHOWN], *refused[:SHOWN]], key=lambda r: r.seconds)
    return rows + faster[:SHOWN] + unlike[: SHOWN - 2]


def _kind(candidate: Candidate) -> tuple[Any, ...]:
    return candidate.plan.layout, candidate.plan.collectives


def _unknown_speed(draft: PlanDraft) -> Problem:
    reason = f"the planner compares plans by their time, and nothing says how fast a {draft.cluster.device} is."
    return Problem("cluster.flops", reason, "Give cluster.flops (dense bfloat16 FLOP/s of one device), or write all degrees out.")


def _nothing(space: Space, found: Found) -> Choice:
    """No option is possible at all: the base, whose problems say why."""
    reasons = sorted(found.impossible.items(), key=lambda item: -item[1])
    rows = [Row(f"{count} layouts", 0.0, reason) for reason, count in reasons[:SHOWN]]
    return Choice(dict(space.first), "no plan is possible", rows)
