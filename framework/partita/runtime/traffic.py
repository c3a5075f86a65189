"""What one rank sends to others, by purpose: how much, for how long, and how long it stood waiting for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from partita.runtime.mesh import Group
from partita.runtime.relay import Work


@dataclass
class Tally:
    """Of one purpose. bytes: sent by this rank to others. seconds: during which at least one of its messages was under way. exposed:
    seconds that this rank stood waiting for them; the rest was hidden behind computing."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes/s that this rank sent while messages were under way: what is called bus bandwidth."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def add(self, other: Tally) -> None:
        """Sums of both."""
        self.calls += other.calls
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.exposed += other.exposed


class Traffic:
    """Tallies of one rank. Waits count as exposed in the thread that made this; other threads wait beside the computing."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._active: dict[str, tuple[int, float]] = {}  # purpose -> (messages under way, since when there has been one)
        self._lock = threading.Lock()
        self._owner = threading.get_ident()

    def take(self) -> dict[str, Tally]:
        """What has been counted since the last call, by purpose."""
        with self._lock:
            now = time.perf_counter()
            for purpose, (count, since) in self._active.items():
                if count:  # under way across two steps: each gets its part
                    self._of(purpose).seconds += now - since
                    self._active[purpose] = (count, now)
            taken, self._tallies = self._tallies, {}
            return taken

    def _of(self, purpose: str) -> Tally:
        return self._tallies.setdefault(purpose, Tally())

    def begin(self, purpose: str, size: int) -> float:
        """A message of `size` bytes to others begins; 0: somebody else's, which this rank receives."""
        with self._lock:
            tally = self._of(purpose)
            tally.calls += size > 0
            tally.bytes += size
        return self.resume(purpose)

    def resume(self, purpose: str) -> float:
        """A message is under way from now on."""
        now = time.perf_counter()
        with self._lock:
            count, since = self._active.get(purpose, (0, now))
            self._active[purpose] = (count + 1, since if count else now)
        return now

    def end(self, purpose: str) -> None:
        """A message has arrived."""
        now = time.perf_counter()
        with self._lock:
            count, since = self._active[purpose]
            if count == 1:
                self._of(purpose).seconds += now - since
            self._active[purpose] = (count - 1, since)

    def under_way(self, purpose: str, work: Work, tensors: Any) -> Work:
        """A work for the message that has begun. tensors: what must live as long as it does."""
        return _Message(self, purpose, work, tensors)

    def waited(self, purpose: str, work: Work) -> Work:
        """The work, with its wait counted as exposed."""
        return _Waited(self, purpose, work)

    def wait(self, purpose: str, work: Work) -> Any:
        """`work.wait()`, counted as exposed where the computing waits for it."""
        if threading.get_ident() != self._owner:
            return work.wait()
        before = time.perf_counter()
        result = work.wait()
        with self._lock:
            self._of(purpose).exposed += time.perf_counter() - before
        return result

    @contextmanager
    def blocking(self, purpose: str, size: int) -> Iterator[None]:
        """Around a message that is waited for at once."""
        before = self.begin(purpose, size)
        try:
            yield
        finally:
            self.end(purpose)
            with self._lock:
                self._of(purpose).exposed += time.perf_counter() - before


class _Waited:
    def __init__(self, traffic: Traffic, purpose: str, work: Any) -> None:
        self._traffic, self._purpose, self._work = traffic, purpose, work

    def wait(self) -> Any:
        return self._traffic.wait(self._purpose, self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Message(_Waited):
    """Ends when the backend says so, which may be long before anyone waits; on an accelerator at the wait. Of messages between two
    ranks gloo doesn't say when they end: their seconds are those of waiting."""

    def __init__(self, traffic: Traffic, purpose: str, work: Any, tensors: Any) -> None:
        super().__init__(traffic, purpose, work)
        self._tensors = tensors
        self._resumes = self._ends = False  # at the wait
        if _device(tensors[0]).type != "cpu":
            self._ends = True
            return
        try:
            work.get_future().add_done_callback(lambda _: traffic.end(purpose))
        except RuntimeError:
            traffic.end(purpose)
            self._resumes = self._ends = True

    def is_completed(self) -> bool:
        """Whoever asks, and is told so, need not wait."""
        done: bool = self._work.is_completed()
        if done and self._ends and not self._resumes:
            self._ends = False
            self._traffic.end(self._purpose)
        return done

    def wait(self) -> Any:
        if self._resumes:
            self._traffic.resume(self._purpose)
        result = super().wait()
        if self._ends:
            self._resumes = self._ends = False
            self._traffic.end(self._purpose)
        return result


def _device(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.device:
    return tensors.device if isinstance(tensors, torch.Tensor) else tensors[0].device


# ------------------------------------------------------------------ messages that don't go through the state engine

_current: Traffic | None = None
_NOTHING = nullcontext()


def watch(traffic: Traffic | None) -> None:
    """From now on count also what layers send among themselves (tensors, pipelines, experts) in this process; None: no longer."""
    global _current
    _current = traffic


def outside(buffer: torch.Tensor, group: Group) -> int:
    """Bytes of a buffer that are not this rank's part of it."""
    return buffer.numel() * buffer.element_size() * (group.size - 1) // group.size


def purpose_of(group: Group) -> str:
    """Of messages between layers: the axes along which they travel, such as `tensor`."""
    return "_".join(group.axes)


def sending(purpose: str, size: int) -> AbstractContextManager[None]:
    """Around a message of this rank that is waited for at once. size: bytes to others. Nothing where nobody counts."""
    return _NOTHING if _current is None else _current.blocking(purpose, size)


def sending_among(group: Group, buffer: torch.Tensor, times: int = 1, purpose: str = "") -> AbstractContextManager[None]:
    """`sending` of all that is not this rank's part of a buffer, `times` over; for the axes of the group, where no purpose is named.

    What nobody counts isn't reckoned either.
    """
    if _current is None:
        return _NOTHING
    return _current.blocking(purpose or purpose_of(group), times * outside(buffer, group))


def sent_among(group: Group, buffer: torch.Tensor, work: Any, times: int = 1, purpose: str = "") -> Any:
    """The same of a message that has just begun; returns what to wait for."""
    if _current is None:
        return work
    return sent(purpose or purpose_of(group), times * outside(buffer, group), work, buffer)


def sent(purpose: str, size: int, work: Any, *tensors: Any) -> Any:
    """A message of this rank that has just begun; returns what to wait for. Nothing where nobody counts."""
    if _current is None or work is None:
        return work
    _current.begin(purpose, size)
    return _current.under_way(purpose, work, tensors)
