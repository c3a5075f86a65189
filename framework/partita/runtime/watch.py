"""A rank's view of the others: it doesn't outlive its parent, nor long the failure of another rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

EVERY = 0.5  # seconds between looks
LINGER = 5.0  # seconds that a rank gets to leave by itself after another has failed


def die_with(parent: int) -> None:
    """Ask the kernel (Linux) to end this process with its parent, kill -9 included. The watch sees to it elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


class Watch(threading.Thread):
    """Ends this process when its parent is gone, or when another rank has failed and this one waits for it in a collective."""

    def __init__(self, failure: Path, parent: int) -> None:
        super().__init__(daemon=True, name="partita-watch")
        self._failure, self._parent, self._done = failure, parent, threading.Event()

    def run(self) -> None:
        """Look twice a second."""
        while not self._done.wait(EVERY):
            if os.getppid() != self._parent:
                os._exit(1)
            if self._failure.exists():
                if not self._done.wait(LINGER):
                    os._exit(1)
                return

    def stop(self) -> None:
        """The rank ends by itself."""
        self._done.set()
