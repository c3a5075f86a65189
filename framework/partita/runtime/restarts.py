"""Goes on by itself after a rank is lost: with the ranks that are there, and with all of them again later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from partita.errors import RunInterrupted
from partita.runtime.failure import RankFailure
from partita.runtime.launch import joined, launch
from partita.runtime.spec import RunSpec
from partita.runtime.worker import Entry

log = logging.getLogger("partita")


@dataclass(frozen=True)
class Bounds:
    """restarts: after a lost rank, in the whole run. min_ranks: with fewer the run fails. cooldown: seconds a lost place stays empty."""

    restarts: int = 0
    min_ranks: int = 1
    cooldown: float = 300.0


def launch_lasting(entry: Entry, spec: RunSpec, replan: Callable[[int], RunSpec | None], bounds: Bounds) -> dict[str, Any]:
    """`launch`, again and again: returns rank 0's summary of the last start.

    replan(n): the run for at most n ranks, from its newest checkpoint; None where no plan within the bounds exists. A failure
    that would come again (an exception of ours, a wrong value) is raised at once. Raises what `launch` does.
    """
    if joined() is not None or not bounds.restarts:
        return launch(entry, spec, spec.ranks)
    full, left, grow_at = spec.ranks, bounds.restarts, None
    while True:
        try:
            return launch(entry, spec, spec.ranks, grow_at)
        except RankFailure as failure:
            smaller = replan(spec.ranks - failure.lost) if failure.lost and left else None
            if smaller is None:
                raise
            left -= 1
            log.warning("%s", failure)
            log.warning("going on with %d of %d ranks (%d restarts left)", smaller.ranks, full, left)
            spec, grow_at = smaller, time.monotonic() + bounds.cooldown
        except RunInterrupted as stopped:
            if not stopped.to_grow:
                raise
            larger = replan(full)
            if larger is None:
                raise
            log.warning("going on with %d ranks again", larger.ranks)
            spec, grow_at = larger, None if larger.ranks == full else time.monotonic() + bounds.cooldown
        if spec.ranks == full:
            grow_at = None
