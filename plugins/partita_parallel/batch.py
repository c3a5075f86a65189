"""Solves the batch: global_batch = data x micro_batch x micro_batches. What is left on auto follows; nothing is ever rounded."""

from __future__ import annotations

from dataclasses import dataclass

from partita.plan.plan import Layout
from partita.plan.problems import Problem

LARGEST_AUTO = 8  # sequences; more rarely makes a pass faster and always makes activations larger


@dataclass(frozen=True)
class Batch:
    """Sequences of a pass, and passes of a rank for one update."""

    micro_batch: int
    micro_batches: int


def whole_batch(layout: Layout, micro: int | None, count: int | None) -> int:
    """A global batch that is left on auto: what the ranks make of micro-batch and micro-batches, 1 each where nothing is said."""
    return layout.data * (micro or 1) * (count or 1)


def solve_batch(global_batch: int, layout: Layout, micro: int | None, count: int | None) -> tuple[Batch, list[Problem]]:
    """The batch and, where the equation can't hold, one problem that shows it. `None` stands for auto."""
    if global_batch < 1:
        reason = f"a batch of {global_batch} sequences can't be trained on."
        return Batch(micro or 1, count or 1), [Problem("train.global_batch", reason, "Give a positive number of sequences.")]
    share, rest = divmod(global_batch, layout.data)
    if rest:
        return Batch(micro or 1, count or 1), [_indivisible(global_batch, layout)]
    if micro is None and count is None:
        micro = largest_divisor(share, min(LARGEST_AUTO, max(1, share // layout.pipeline)))
    micro, count = _fill(share, micro, count)
    if layout.data * micro * count != global_batch:
        return Batch(micro, count), [_unequal(global_batch, layout, micro, count)]
    return Batch(micro, count), []


def _fill(share: int, micro: int | None, count: int | None) -> tuple[int, int]:
    """The missing one of the two, at least 1 (the equation is checked afterwards)."""
    if micro is None:
        micro = max(1, share // (count or 1))
    if count is None:
        count = max(1, share // micro)
    return micro, count


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _indivisible(global_batch: int, layout: Layout) -> Problem:
    data = layout.data
    below, above = global_batch // data * data, (global_batch // data + 1) * data
    legal = " or ".join(str(n) for n in (below, above) if n)
    reason = f"train.global_batch = {global_batch} sequences can't be shared by data = {data} ranks{_dp_text(layout)}."
    fitting = ", ".join(str(d) for d in range(1, data + 1) if global_batch % d == 0)
    return Problem("train.global_batch", reason, f"Set train.global_batch={legal}, or parallel.data to one of {fitting}.")


def _unequal(global_batch: int, layout: Layout, micro: int, count: int) -> Problem:
    data, share = layout.data, global_batch // layout.data
    reason = (
        "train.global_batch = data x train.micro_batch x parallel.microbatches does not hold: "
        f"{global_batch} != {data} x {micro} x {count} = {data * micro * count}{_dp_text(layout)}."
    )
    ways = [f"train.global_batch={data * micro * count}"]
    if share % count == 0:
        ways.append(f"train.micro_batch={share // count}")
    if share % micro == 0:
        ways.append(f"parallel.microbatches={share // micro}")
    divisors = ", ".join(str(d) for d in range(1, share + 1) if share % d == 0)
    return Problem("train.micro_batch", reason, f"Set {' or '.join(ways)}. Micro-batches that fit: {divisors}.")


def _dp_text(layout: Layout) -> str:
    """Why data is not the world, where it is not."""
    if layout.data == layout.world:
        return ""
    takers = [f"{axis} takes {getattr(layout, axis)}" for axis in ("pipeline", "context", "tensor") if getattr(layout, axis) > 1]
    return f" (data is {layout.data} of {layout.world} ranks: {', '.join(takers)})"
