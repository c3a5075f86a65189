"""What travels from the process that plans to the ranks: plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partita.config.job import JobInfo
from partita.plan.plan import Plan


@dataclass(frozen=True)
class RunSpec:
    """config: nested dict of `partita.config.plain.to_plain`. blocked: names of plug-ins that stay out."""

    config: dict[str, Any]
    plan: Plan
    job: JobInfo
    ranks: int
    blocked: tuple[str, ...] = ()
