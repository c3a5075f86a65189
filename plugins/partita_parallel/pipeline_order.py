"""In which order each rank of a pipeline works: lists of actions, and what follows from them (bubble, micro-batches in flight).

The orders of the interleaved and zero-bubble schedules are those of torch.distributed.pipelining; GPipe (Huang et al. 2019) and 1F1B
(Narayanan et al. 2019, PipeDream-Flush) are simple enough to be written here, for any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

# Stages of each rank, where the user doesn't say, and how they lie: `loop` (stage s on rank s mod p) or `v` (there and back)
STAGES = {
    "gpipe": (1, "loop"),
    "1f1b": (1, "loop"),
    "interleaved": (2, "loop"),
    "interleaved_zb": (2, "loop"),
    "zbv": (2, "v"),
    "dualpipev": (2, "v"),
}
SCHEDULES = tuple(STAGES)
TORCH = {
    "interleaved": "Interleaved1F1B",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
SPLIT = ("interleaved_zb", "zbv", "dualpipev")  # schedules that run backward in two halves
FIXED = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}  # schedules that know one number of stages only

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"  # B: all of backward; I and W: its halves
SECONDS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}  # relative; Qi et al. 2023, section 2


class Action(NamedTuple):
    """One forward or backward of one micro-batch on one stage."""

    kind: str
    stage: int
    micro: int


Orders = Mapping[int, tuple[Action, ...]]


def place_stages(name: str, ranks: int, each: int) -> tuple[int, ...]:
    """Rank of each stage."""
    if STAGES[name][1] == "loop":
        return tuple(range(ranks)) * each
    return tuple(range(ranks)) + tuple(reversed(range(ranks)))


def legal_micro_batches(name: str, ranks: int, each: int, count: int) -> str:
    """Empty where a schedule can work on `count` micro-batches, else which counts it takes."""
    rounds = max(1, count // ranks)
    if name in ("interleaved", "interleaved_zb") and count % rounds:
        near = [n for n in range(max(1, count - ranks), count + ranks + 1) if n % max(1, n // ranks) == 0]
        return f"{name} works in rounds of {ranks} or a little more; near {count} it takes {', '.join(map(str, near))}"
    if name == "dualpipev" and count < ranks * each:
        return f"dualpipev needs as many micro-batches as stages, {ranks * each}, or more"
    return ""


@lru_cache(maxsize=64)
def orders(name: str, ranks: int, each: int, count: int) -> Orders:
    """Actions of each rank of `ranks` with `each` stages, for `count` micro-batches."""
    if name in TORCH:
        return _orders_of_torch(TORCH[name], ranks, each, count)
    rule = _gpipe if name == "gpipe" else _one_forward_one_backward
    return {rank: tuple(rule(rank, ranks, count)) for rank in range(ranks)}


def _gpipe(rank: int, ranks: int, count: int) -> list[Action]:
    return [Action(FORWARD, rank, m) for m in range(count)] + [Action(BACKWARD, rank, m) for m in range(count)]


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[Action]:
    ahead = min(ranks - rank, count)
    order = [Action(FORWARD, rank, m) for m in range(ahead)]
    for m in range(count):
        order.append(Action(BACKWARD, rank, m))
        if m + ahead < count:
            order.append(Action(FORWARD, rank, m + ahead))
    return order


def _orders_of_torch(name: str, ranks: int, each: int, count: int) -> Orders:
    """torch's schedules are made for its own stages, but their order only asks how many there are."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(num_stages=ranks * each, group_size=ranks, group_rank=0, stage_index=i, submod=None) for i in range(each)
    ]
    made = get_schedule_class(name)(stages, count, scale_grads=False).pipeline_order
    kinds = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}

    def flat(action: object) -> list[Action]:
        inner = getattr(action, "sub_actions", None)
        if inner is not None:
            return [a for sub in inner for a in flat(sub)]
        if action is None:
            return []
        kind = kinds[action.computation_type.value]  # type: ignore[attr-defined]
        return [Action(kind, action.stage_index, action.microbatch_index)]  # type: ignore[attr-defined]

    return {rank: tuple(a for action in made[rank] for a in flat(action)) for rank in range(ranks)}


def needs(action: Action, last: int) -> list[Action]:
    """Actions whose results an action reads: one of those that are listed, where there are several kinds."""
    kind, stage, micro = action
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, micro)] if stage else []
    if kind == WEIGHT:
        return [Action(INPUT, stage, micro)]
    return [Action(FORWARD, stage, micro)] if stage == last else [Action(k, stage + 1, micro) for k in (BACKWARD, INPUT)]


@dataclass(frozen=True)
class Course:
    """What a schedule comes to. bubble: time that a rank waits over the time that it computes. in_flight: by stage, micro-batches whose
    activations are kept when the rank keeps most."""

    bubble: float
    in_flight: tuple[int, ...]


@lru_cache(maxsize=512)
def course_of(name: str, ranks: int, each: int, count: int) -> Course:
    """The course of a schedule. Beyond four rounds of micro-batches nothing new happens: the waiting stays what it is."""
    played = min(count, 4 * ranks)
    found = simulate(orders(name, ranks, each, played), ranks * each)
    in_flight = found.in_flight if name != "gpipe" else (count,) * ranks
    return Course(found.bubble * played / count, in_flight)


def simulate(found: Orders, stages: int, seconds: Callable[[Action], float] | None = None) -> Course:
    """Play the orders; raises ValueError where they would wait for each other for ever. seconds: of an action, by default `SECONDS`."""
    cost = seconds or (lambda a: SECONDS[a.kind])
    done: dict[Action, float] = {}
    clock = dict.fromkeys(found, 0.0)
    at = dict.fromkeys(found, 0)
    moved = True
    while moved:
        moved = False
        for rank, actions in found.items():
            while at[rank] < len(actions):
                action = actions[at[rank]]
                wanted = needs(action, stages - 1)
                ready = [done[a] for a in wanted if a in done]
                if wanted and not ready:
                    break
                clock[rank] = max([clock[rank], *ready]) + cost(action)
                done[action] = clock[rank]
                at[rank] += 1
                moved = True
    if any(at[rank] < len(actions) for rank, actions in found.items()):
        raise ValueError("the orders of the ranks wait for each other")
    busy = max(sum(cost(a) for a in actions) for actions in found.values())
    return Course(max(clock.values()) / busy - 1.0, _in_flight(found, stages))


def _in_flight(found: Orders, stages: int) -> tuple[int, ...]:
    peak = [0] * stages
    for actions in found.values():
        now: dict[int, int] = dict.fromkeys((a.stage for a in actions), 0)
        best = 0
        for action in actions:
            now[action.stage] += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(action.kind, 0)
            if sum(now.values()) > best:
                best = sum(now.values())
                for stage, number in now.items():
                    peak[stage] = number
    return tuple(peak)
