"""Out of memory: what the plan expected, what was there, and what would fit."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

from partita_diagnosis.report import Report

# (what to write, node, field, value) in the order in which they cost least
CHANGES: tuple[tuple[str, str, str, Any], ...] = (
    ("recompute=selective", "recompute", "policy", "selective"),
    ("recompute=full", "recompute", "policy", "full"),
    ("zero.stage=1", "zero", "stage", 1),
    ("zero.stage=2", "zero", "stage", 2),
    ("zero.stage=3", "zero", "stage", 3),
    ("offload.optimizer=host", "offload", "optimizer", "host"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device's allocator or of the host's."""
    text = str(error).lower()
    return (
        type(error).__name__ == "OutOfMemoryError"
        or isinstance(error, MemoryError)
        or "out of memory" in text
        or ("can't allocate memory" in text)
    )


def tell(run: Any, error: BaseException, report: Report) -> None:
    """The plan's table beside what was measured, and at most three changes that would fit, cheapest first."""
    from partita.plan.make import make_plan

    planned = make_plan(run.config, run.registry)
    expected = _bytes(planned)
    measured = {**run.engine.allocated(), "peak": run.device.memory()}
    rows = [
        f"{kind}: planned {expected.get(kind, 0):,}, measured {measured.get(kind, 0):,} bytes"
        for kind in measured
        if kind != "peak"
    ]
    total, needed = sum(expected.values()), measured["peak"] + asked_bytes(str(error))
    # On a CPU the peak is the whole process, interpreter included, which no plan counts.
    excess = max(1.0, needed / max(total, 1)) if run.device.kind != "cpu" else 1.0
    room = planned.cluster.capacity(planned.plan.layout.world) or measured["peak"]
    advice, least = _advice(run, total, room / excess)
    way_out = f"What would fit: {', '.join(advice)}" if advice else f"No change that was tried fits; the least is {least}"
    cause = (
        f"rank {run.rank} ran out of memory: {str(error).splitlines()[0][:200]}. Planned {total:,} bytes, peak {measured['peak']:,}; "
        f"{'; '.join(rows)}. {way_out}"
    )
    report.add("memory", run.step + 1, cause, about=run.rank, planned=expected, measured=measured, advice=advice)


def asked_bytes(text: str) -> int:
    """What the allocation that failed wanted, from the words of torch's allocators; 0 where they don't say."""
    found = re.search(r"allocate ([\d.]+) (bytes|[KMGT]i?B)", text)
    if found is None:
        return 0
    return int(float(found[1].rstrip(".")) * 1024 ** "bKMGT".index(found[2][0]))


def _advice(run: Any, total: int, room: float) -> tuple[list[str], str]:
    """(up to three changes, or pairs of them, whose plan needs at most `room` bytes and less than `total`; the one that needs least)."""
    from partita.plan.make import make_plan

    singles = _changes(run.config)
    fitting: list[str] = []
    best = (total, "the plan as it is")
    for change in [*([c] for c in singles), *map(list, itertools.combinations(singles, 2))]:
        if len({key.partition("=")[0] for key, *_ in change}) < len(change):
            continue  # two values of one key
        changed = copy.deepcopy(run.config)
        for _, node, field, value in change:
            setattr(getattr(changed, node), field, value)
        try:
            other = make_plan(changed, run.registry)
        except Exception:
            continue  # a change that this model can't have is no advice
        size, words = sum(_bytes(other).values()), " ".join(key for key, *_ in change)
        best = min(best, (size, words))
        if not other.problems and size < 0.95 * total and size <= room:
            fitting.append(f"{words} ({size:,} bytes)")
        if len(fitting) == 3:
            break
    return fitting, f"{best[1]} ({best[0]:,} bytes)"


def _bytes(planned: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for cost in planned.costs:
        if cost.place == "accelerator" and cost.bytes and cost.category not in ("communication", "compute"):
            out[cost.category] = out.get(cost.category, 0) + cost.bytes
    return out


def _changes(config: Any) -> list[tuple[str, str, str, Any]]:
    """Changes that this config does not have yet, as in CHANGES."""
    micro, smaller = config.train.micro_batch, 0
    if isinstance(micro, int) and micro > 1:
        smaller = micro // 2
    elif micro == "auto":
        smaller = 1
    out = [(f"train.micro_batch={smaller}", "train", "micro_batch", smaller)] if smaller else []
    return out + [
        c for c in CHANGES if hasattr(getattr(config, c[1], None), c[2]) and getattr(getattr(config, c[1]), c[2]) != c[3]
    ]
