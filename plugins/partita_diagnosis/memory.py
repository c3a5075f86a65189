"""Out of memory: what the plan expected, what was there, and what would fit."""

from __future__ import annotations

import copy
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
    """The plan's table beside what was measured, and at most three changes whose plan needs less."""
    from partita.plan.make import make_plan

    planned = make_plan(run.config, run.registry)
    expected = _bytes(planned)
    measured = {**run.engine.allocated(), "peak": run.device.memory()}
    rows = [
        f"{kind}: planned {expected.get(kind, 0):,}, measured {measured.get(kind, 0):,} bytes"
        for kind in measured
        if kind != "peak"
    ]
    total = sum(expected.values())
    fitting = []
    for text, changed in _changes(run.config):
        try:
            other = make_plan(changed, run.registry)
        except Exception:
            continue  # a change that this model can't have is no advice
        if not other.problems and sum(_bytes(other).values()) < 0.95 * total:
            fitting.append((sum(_bytes(other).values()), text))
    advice = [f"{text} ({bytes_:,} bytes)" for bytes_, text in sorted(fitting)[:3]]
    cause = (
        f"rank {run.rank} ran out of memory: {str(error).splitlines()[0][:200]}. Planned {total:,} bytes, peak {measured['peak']:,}; "
        f"{'; '.join(rows)}. What would need less: {', '.join(advice) or 'a smaller model or more ranks'}"
    )
    report.add("memory", run.step + 1, cause, about=run.rank, planned=expected, measured=measured, advice=advice)


def _bytes(planned: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for cost in planned.costs:
        if cost.place == "accelerator" and cost.bytes and cost.category not in ("communication", "compute"):
            out[cost.category] = out.get(cost.category, 0) + cost.bytes
    return out


def _changes(config: Any) -> list[tuple[str, Any]]:
    out = []
    micro = config.train.micro_batch
    if isinstance(micro, int) and micro > 1:
        out.append((f"train.micro_batch={micro // 2}", _with(config, "train", "micro_batch", micro // 2)))
    elif micro == "auto":
        out.append(("train.micro_batch=1", _with(config, "train", "micro_batch", 1)))
    for text, node, field, value in CHANGES:
        if hasattr(getattr(config, node, None), field) and getattr(getattr(config, node), field) != value:
            out.append((text, _with(config, node, field, value)))
    return out


def _with(config: Any, node: str, field: str, value: Any) -> Any:
    changed = copy.deepcopy(config)
    setattr(getattr(changed, node), field, value)
    return changed
