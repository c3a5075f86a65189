"""One message for a failed run, whatever the number of ranks: who failed first, where, why, and which file has the rest."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from partita.errors import EXIT_FAILED, PartitaError
from partita.runtime import phase

FIRST = "failure.json"  # in the run's log folder: the failure that the run is judged by
# A collective that broke since another rank is gone. What counts is why that one went.
_ECHOES = re.compile(r"gloo|nccl|xccl|connection (closed|reset|refused)|broken pipe|socket|store", re.IGNORECASE)
_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe", re.IGNORECASE)  # of them, what no rank alone can cause
# A device that has broken; a program that is wrong says other things.
_DEVICE = re.compile(r"uncorrectable|ECC error|has fallen off|device lost|hardware (error|failure)", re.IGNORECASE)


class RankFailure(PartitaError):
    """A rank failed and the run is over. `rank` is the one to look at. lost: ranks whose process or device is gone, so that another
    start may succeed without them; 0 where the same would happen again."""

    def __init__(self, message: str, rank: int, exit_status: int = EXIT_FAILED, lost: int = 0) -> None:
        super().__init__(message)
        self.rank, self.exit_status, self.lost = rank, exit_status, lost


@dataclass(frozen=True)
class Failure:
    """What a rank says of its own failure. `echo`: it failed because another rank was gone."""

    rank: int
    step: int
    phase: str
    cause: str
    time: float
    echo: bool = False
    exit_status: int = EXIT_FAILED


def folder(run: Path) -> Path:
    """Where logs and failures of a run are."""
    return run / "log"


def clear(run: Path) -> None:
    """Forget the failure of an earlier try in the same run folder."""
    folder(run).mkdir(parents=True, exist_ok=True)
    for path in [folder(run) / FIRST, *folder(run).glob("rank*.failure.json")]:
        path.unlink(missing_ok=True)


def report(run: Path, rank: int, error: BaseException) -> Failure:
    """Traceback to the rank's log; the failure to the rank's own file, and to the run's if it is the first that is no echo."""
    logging.getLogger("partita").error("traceback of rank %d:\n%s", rank, "".join(traceback.format_exception(error)).rstrip())
    failure = Failure(
        rank,
        phase.current.step,
        phase.current.phase,
        _cause(error),
        time.time(),
        _is_echo(error),
        error.exit_status if isinstance(error, PartitaError) else EXIT_FAILED,
    )
    own = folder(run) / f"rank{rank}.failure.json"
    part = own.with_suffix(".partial")
    part.write_text(json.dumps(asdict(failure)))
    os.replace(part, own)
    if not failure.echo:
        claim(run, failure)
    return failure


def _is_echo(error: BaseException) -> bool:
    """Whether a rank failed since another one is gone; also where the engine has said in its own words what it waited for."""
    if isinstance(error, RuntimeError | OSError):
        return bool(_ECHOES.search(str(error)))
    return isinstance(error.__cause__, RuntimeError | OSError) and bool(_GONE.search(str(error.__cause__)))


def claim(run: Path, failure: Failure) -> Failure:
    """Make `failure` the run's, unless it has one; returns the run's."""
    own, first = folder(run) / f"rank{failure.rank}.failure.json", folder(run) / FIRST
    try:
        os.link(own, first)
    except FileExistsError:
        return read(first) or failure
    return failure


def read(path: Path) -> Failure | None:
    """A failure that was written, or None."""
    try:
        return Failure(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def judge(run: Path, ranks: int, ended: dict[int, int], positions: list[phase.Position]) -> RankFailure:
    """The one error of a run whose ranks are all gone.

    ended: exit status of ranks (negative: signal number) that ended first, by themselves. positions: where each rank was last.
    """
    reports = [f for path in folder(run).glob("rank*.failure.json") if (f := read(path)) is not None]
    causes = sorted((f for f in reports if not f.echo), key=lambda f: f.time)
    silent = [rank for rank in sorted(ended) if rank not in {f.rank for f in reports}]
    for path in folder(run).glob("rank*.failure.json"):
        path.unlink()
    if causes:
        return _error(run, ranks, causes[0], lost=len({f.rank for f in causes if _DEVICE.search(f.cause)}))
    if silent:
        where = positions[silent[0]]
        cause = _end(ended[silent[0]])
        if len(silent) > 1:
            cause += f"; so ended rank {', '.join(map(str, sorted(silent)[1:9]))}: a whole node may be lost"
        failure = Failure(silent[0], where.step, where.phase, cause, time.time())
        with contextlib.suppress(OSError):  # a full disk: the message says it all the same
            (folder(run) / FIRST).write_text(json.dumps(asdict(failure)))
        return _error(run, ranks, failure, lost=len(silent))
    if reports:
        return _error(run, ranks, min(reports, key=lambda f: f.time), _scattered(positions))
    return RankFailure(f"the ranks ended before the run began\n    logs: {folder(run)}", 0)


def message(run: Path, ranks: int, failure: Failure, more: str = "") -> str:
    """The text for the console."""
    of = f"rank {failure.rank} of {ranks}" if ranks > 1 else "the run"
    log = folder(run) / f"rank{failure.rank}.log"
    return f"{of} failed at step {failure.step} ({failure.phase}): {failure.cause}\n{more}    log: {log}"


def _error(run: Path, ranks: int, failure: Failure, more: str = "", lost: int = 0) -> RankFailure:
    return RankFailure(message(run, ranks, failure, more), failure.rank, failure.exit_status, lost)


def _scattered(positions: list[phase.Position]) -> str:
    """A line that says where the ranks were, when they were not at the same place."""
    places: dict[str, list[str]] = {}
    for rank, position in enumerate(positions):
        places.setdefault(str(position), []).append(str(rank))
    if len(places) < 2:
        return ""
    where = "; ".join(
        f"{place}: rank {', '.join(ranks[:8])}{' ...' if len(ranks) > 8 else ''}" for place, ranks in places.items()
    )
    return f"    the ranks were not at the same place, which all must reach: {where}\n"


def _cause(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, PartitaError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _end(status: int) -> str:
    if status >= 0:
        return f"its process ended without a word, with exit status {status}"
    name = signal.Signals(-status).name
    hint = " (by the system when memory runs out, or by hand)" if -status == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"
