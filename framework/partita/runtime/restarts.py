"""Goes on by itself after a rank is lost: with the ranks that are there, and with all of them again later."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.errors import RunInterrupted
from partita.runtime.failure import RankFailure
from partita.runtime.launch import joined, launch
from partita.runtime.scratch import nameless_file
from partita.runtime.spec import MEMORY, RunSpec
from partita.runtime.worker import Entry

log = logging.getLogger("partita")


@dataclass(frozen=True)
class Bounds:
    """restarts: after a lost rank, in the whole run. min_ranks: with fewer the run fails. cooldown: seconds a lost place stays empty.

    memory: give the ranks memory that outlives them.
    """

    restarts: int = 0
    min_ranks: int = 1
    cooldown: float = 300.0
    memory: bool = False


def launch_lasting(entry: Entry, spec: RunSpec, replan: Callable[[int], RunSpec | None], bounds: Bounds) -> dict[str, Any]:
    """`launch`, again and again: returns rank 0's summary of the last start.

    replan(n): the run for at most n ranks, from its newest checkpoint; None where no plan within the bounds exists. A failure
    that would come again (an exception of ours, a wrong value) is raised at once. Raises what `launch` does.
    """
    if joined() is not None or not bounds.restarts:
        return launch(entry, spec, spec.ranks)
    with ExitStack() as stack:
        stack.enter_context(_documents(spec.job.dir / MEMORY))
        files = [stack.enter_context(nameless_file("snapshot")) for _ in range(2 * spec.ranks * bounds.memory)]
        return _launch_on(entry, spec, replan, bounds, tuple(map(str, files)))


@contextmanager
def _documents(folder: Path) -> Iterator[None]:
    """What says what the memory holds; of no use before it or after it."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _launch_on(
    entry: Entry, spec: RunSpec, replan: Callable[[int], RunSpec | None], bounds: Bounds, memory: tuple[str, ...]
) -> dict[str, Any]:
    full, left, grow_at = spec.ranks, bounds.restarts, None
    while True:
        spec = replace(spec, memory=memory)
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
