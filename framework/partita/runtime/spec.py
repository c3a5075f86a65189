"""What travels from the process that plans to the ranks: plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partita.config.job import JobInfo
from partita.plan.plan import Plan

MEMORY = "memory"  # in the run's folder: documents of the snapshots in memory


@dataclass(frozen=True)
class RunSpec:
    """config: nested dict of `partita.config.plain.to_plain`. blocked: names of plug-ins that stay out.

    memory: files in memory that outlive the ranks, for their snapshots: two for each rank of the largest start."""

    config: dict[str, Any]
    plan: Plan
    job: JobInfo
    ranks: int
    blocked: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
