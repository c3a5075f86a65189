"""Findings: one line of JSON each, and the same in words in the log."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("partita")
FILE = "diagnosis.jsonl"


class Report:
    """The findings of one run, as this rank writes them. A finding of the same kind about the same thing is written once."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = folder / FILE, rank
        self._known: set[tuple[str, Any]] = set()

    def add(self, kind: str, step: int, cause: str, *, about: Any = None, **evidence: Any) -> None:
        """kind: hang, straggler, nonfinite, spike, replicas, corruption, memory, checkpoint, disk, clock, failure.

        cause: the likely cause, as a sentence. about: the rank, module or file it is about. evidence: what was seen.
        """
        if (kind, str(about)) in self._known:
            return
        self._known.add((kind, str(about)))
        line = {"kind": kind, "step": step, "about": about, "cause": cause, "by": self._rank, "time": time.time(), **evidence}
        text = (json.dumps(line, default=str) + "\n").encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, text)  # one write: lines of several ranks don't mix
        finally:
            os.close(handle)
        log.warning("diagnosis: %s at step %d: %s", kind, step, cause)
