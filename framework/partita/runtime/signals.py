"""Signals become a flag that all ranks agree on at a step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group

ECHO = 1.0  # seconds in which a second SIGINT is the first one again: from the terminal, and passed on by whoever started us
STOPS = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """Set by SIGINT or SIGTERM. The loop adds `local()` up over the ranks in an all-reduce that it makes anyway, and asks
    `signal_of` the sum; or it calls `agreed`. A second SIGINT ends the process at once."""

    _installed: StopFlag | None = None

    def __init__(self) -> None:
        self._signum = 0
        self._since = 0.0

    @classmethod
    def installed(cls) -> StopFlag:
        """The flag of this process; installs the handlers when called in the main thread (elsewhere nothing sets the flag)."""
        if cls._installed is None:
            cls._installed = cls()
        if threading.current_thread() is threading.main_thread():
            for signum in STOPS:
                signal.signal(signum, cls._installed.handle)
        return cls._installed

    def handle(self, signum: int, _frame: FrameType | None = None) -> None:
        """The signal handler."""
        now = time.monotonic()
        if signum == self._signum == signal.SIGINT and now - self._since > ECHO:
            os._exit(128 + signum)
        if not self._signum:
            self._since = now
        # A Ctrl-C while a SIGTERM waits counts as the first of its kind.
        self._signum = signum

    @property
    def signum(self) -> int:
        """The signal that this process got, or 0."""
        return self._signum

    def local(self) -> int:
        """What this rank adds to the sum over all ranks: 0, or a number from which `signal_of` finds the signal."""
        return 0 if not self._signum else _WEIGHTS[self._signum]

    def agreed(self, group: Group | None, device: torch.device | None = None) -> int:
        """The signal that any rank of `group` got, or 0. Collective: the same answer on all of them."""
        if group is None or group.size == 1:
            return self._signum
        total = torch.tensor([self.local()], dtype=torch.int64, device=device)
        dist.all_reduce(total, group=group.process_group)
        return signal_of(int(total.item()))


# Sums of these over up to a million ranks keep the two apart, and are exact in float64 as well as in int64.
_WEIGHTS = {int(signal.SIGTERM): 1, int(signal.SIGINT): 1 << 20}


def signal_of(total: int) -> int:
    """The signal behind a sum of `StopFlag.local()` over ranks, or 0. SIGINT wins over SIGTERM."""
    if total >= _WEIGHTS[signal.SIGINT]:
        return int(signal.SIGINT)
    return int(signal.SIGTERM) if total else 0
