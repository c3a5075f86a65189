"""What the process that started the ranks does while they run: passes signals on, and sees to it that all end together."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from partita.runtime.phase import DONE, Board
from partita.runtime.signals import StopFlag

log = logging.getLogger("partita")
TICK = 0.05  # seconds between looks
LINGER = 3.0  # seconds that ranks get to leave by themselves after one has ended
STALL = 60.0  # seconds without any progress, ranks at different places, until a warning
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """A context around the launcher.

    First signal: all ranks are told, once; those that have not ended after `grace` seconds are killed. Second Ctrl-C: all is
    ended at once. A rank that ends before the run does: the others get a moment to say why, then they are killed.
    """

    def __init__(self, board: Board, grace: float, leave_at: float | None = None) -> None:
        """leave_at: monotonic seconds at which the ranks are told to save and leave, as by a signal."""
        self.to_grow = False  # the ranks were told since `leave_at` had come
        self._leave_at = leave_at
        self.signum = 0  # the first signal that came
        self.late = False  # ranks were killed since `grace` was over
        self.ended: dict[int, int] = {}  # rank -> exit status (negative: signal) of ranks that ended first, by themselves
        self._board, self._grace, self._owner = board, grace, os.getpid()
        self._since = 0.0
        self._told: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="partita-supervisor", daemon=True)
        self._before: dict[int, Any] = {}
        self._places: tuple[list[str], float] = ([], time.monotonic())

    def __enter__(self) -> Supervisor:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
                    self._before[signum] = signal.signal(signum, self._handle)
            # The launcher reaps what ends; this handler runs first, and sees how it ended.
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: self._look())
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._look()
        self._over.set()
        self._thread.join()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a rank that was forked a moment ago and has no handler of its own yet
            StopFlag.installed().handle(signum, frame)
            return
        if signum == signal.SIGINT and self.signum:
            self._kill(self._alive())
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # rank 0 may have hidden the cursor
            os._exit(128 + signum)
        if not self.signum or self.to_grow:
            self.to_grow = False
            self._since = time.monotonic()
            self.signum = int(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        failed_at = None
        while not self._over.wait(TICK):
            now = time.monotonic()
            if self._leave_at is not None and now > self._leave_at and not self.signum:
                self.to_grow, self._since, self.signum = True, now, int(signal.SIGTERM)
            self._pass_on()
            if failed_at is None and self._look():
                failed_at = now
            if failed_at is not None:
                if now - failed_at > LINGER:
                    self._over.set()  # those that are killed now have not ended by themselves
                    self._kill(self._alive())
                    return
            elif self.signum and now - self._since > self._grace and not self.late:
                self.late = True
                self._kill(self._alive())
            self._mind_stalls(now)

    def _pass_on(self) -> None:
        if not self.signum:
            return
        for rank, position in enumerate(self._board.all()):
            if position.pid and rank not in self._told:
                self._told.add(rank)
                _send(position.pid, self.signum)

    def _look(self) -> bool:
        """Note ranks that have ended before their work was done; whether there are any."""
        if self.late or self._over.is_set() or os.getpid() != self._owner:
            return bool(self.ended)
        for rank, position in enumerate(self._board.all()):
            if position.pid and rank not in self.ended:
                status = exit_status(position.pid)
                # a rank that is done waits for the launcher to take its result, and is missed by the others if it is killed there
                if status is not None and (status or position.phase != DONE):
                    self.ended[rank] = status
        return bool(self.ended)

    def _alive(self) -> list[int]:
        return [p.pid for p in self._board.all() if p.pid and exit_status(p.pid) is None]

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            _send(pid, signal.SIGKILL)

    def _mind_stalls(self, now: float) -> None:
        """One warning when ranks stay at different places: a collective that not all of them reach."""
        places = [str(p) for p in self._board.all()]
        if places != self._places[0]:
            self._places = (places, now)
        elif len(set(places)) > 1 and now - self._places[1] > STALL and not any(DONE in p for p in places):
            where = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places[:16]))
            log.warning("no progress for %.0f s, and the ranks are at different places: %s", now - self._places[1], where)
            self._places = (places, float("inf"))


def exit_status(pid: int) -> int | None:
    """Of a child that has ended, without reaping it (negative: by a signal; 0 if it was reaped before); None while it runs."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        log.debug("process %d is gone already", pid)
