"""Results of the jobs of a sweep: a file in each job's folder, a table at the end."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FILE = "result.json"


@dataclass(frozen=True)
class Outcome:
    """One job. status: done, failed, interrupted. objective: what a sweeper minimizes (evaluation loss, else the last loss)."""

    number: int
    name: str
    overrides: list[str] = field(default_factory=list)
    status: str = "failed"
    seconds: float = 0.0
    objective: float | None = None
    error: str = ""
    summary: dict[str, Any] = field(default_factory=dict)

    def done(self, result: Any) -> Outcome:
        """With what the job returned."""
        summary = {k: v for k, v in result.items() if _jsonable(v)} if isinstance(result, dict) else {}
        return replace(self, status="done", summary=summary, objective=_objective(result))

    def failed(self, error: BaseException) -> Outcome:
        """With the error that ended the job."""
        from partita.errors import RunInterrupted

        status = "interrupted" if isinstance(error, RunInterrupted) else "failed"
        return replace(self, status=status, error=f"{type(error).__name__}: {error}")

    def write(self, folder: Path) -> None:
        """Complete or not there: the file says that a job need not be run again."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{FILE}.{os.getpid()}"
        part.write_text(json.dumps(asdict(self), indent=1))
        part.replace(folder / FILE)


def _jsonable(value: Any) -> bool:
    return value is None or isinstance(value, str | int | bool | float)


def _objective(result: Any) -> float | None:
    if isinstance(result, dict):
        for name in ("objective", "eval_loss", "loss"):
            if isinstance(result.get(name), int | float):
                return float(result[name])
        return None
    return float(result) if isinstance(result, int | float) and not isinstance(result, bool) else None


def read(folder: Path) -> Outcome | None:
    """The outcome in a job's folder, if there is a readable one."""
    try:
        return Outcome(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None  # no file, or one that another version wrote: the job counts as not run


def finished(folder: Path) -> Outcome | None:
    """The outcome of a job that is done, marked as seen by this sweep."""
    outcome = read(folder)
    if outcome is None or outcome.status != "done":
        return None
    os.utime(folder / FILE)
    return outcome


def outcomes(sweep: Path, since: float) -> list[Outcome]:
    """Jobs in a sweep's folder that were run or found done since a time (seconds since the epoch), by number."""
    files = [f for f in sweep.glob(f"*/{FILE}") if f.stat().st_mtime >= since - 1.0]
    found = [o for f in files if (o := read(f.parent)) is not None]
    return sorted(found, key=lambda o: o.number)


def show_summary(found: Sequence[Outcome], folder: Path) -> None:
    """The table of jobs, best objective marked."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    done = [o for o in found if o.status == "done"]
    ranked = [o.objective for o in done if o.objective is not None and not math.isnan(o.objective)]
    table = Table(
        "job",
        "overrides",
        "status",
        "loss",
        "seconds",
        title=f"{len(done)} of {len(found)} jobs done in {folder}",
        title_justify="left",
    )
    for o in found:
        loss = "" if o.objective is None else f"{o.objective:.4f}" + (" *" if ranked and o.objective == min(ranked) else "")
        name = o.name.partition("_")[2] or o.name
        status = o.status if o.status == "done" else f"{o.status}: {o.error.splitlines()[0][:60]}"
        table.add_row(str(o.number), Text(name), Text(status), loss, f"{o.seconds:.1f}")
    sys.stdout.flush()
    Console(width=None if sys.stdout.isatty() else 160).print(table)
