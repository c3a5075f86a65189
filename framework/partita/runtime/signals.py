"""Signals become a flag that all ranks agree on at a step boundary."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopFlag:
    """Set by SIGINT or SIGTERM; the loop folds `local()` into an all-reduce that it makes anyway. A second SIGINT ends at once."""

    _installed: StopFlag | None = None

    def __init__(self) -> None:
        self._signum = 0

    @classmethod
    def installed(cls) -> StopFlag:
        """The flag of this process; installs the handlers the first time (main thread only)."""
        if cls._installed is None:
            flag = cls()
            signal.signal(signal.SIGINT, flag._handle)
            signal.signal(signal.SIGTERM, flag._handle)
            cls._installed = flag
        return cls._installed

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self._signum == signal.SIGINT and signum == signal.SIGINT:
            os._exit(128 + signum)
        self._signum = signum

    def local(self) -> int:
        """Signal number that this rank was asked to stop with, or 0."""
        return self._signum
