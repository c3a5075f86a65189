"""Counts and times this rank's collectives: the functions of torch.distributed are wrapped for as long as a run lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch.distributed as dist

from partita.runtime.relay import Relayed
from partita_diagnosis.beat import Beat

# Not isend and irecv: P2POp takes torch's own functions only, and compares them by identity.
NAMES = (
    "all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "barrier", "send", "recv",
    "batch_isend_irecv", "all_gather_object",
)  # fmt: skip


class Waited:
    """A collective under way whose wait is timed."""

    def __init__(self, work: Any, watch: Watch) -> None:
        self._work, self._watch = work, watch

    def wait(self, *arguments: Any) -> Any:
        """Like the work's own."""
        if not self._watch.mine():
            return self._work.wait(*arguments)
        with self._watch:
            return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Watch:
    """Seconds spent in collectives, and which was the last. A context around everything that waits for other ranks."""

    def __init__(self, beat: Beat) -> None:
        self.seconds = 0.0
        self._owner = threading.get_ident()
        self._beat, self._since = beat, 0.0
        self._before = {name: getattr(dist, name) for name in NAMES if hasattr(dist, name)}
        for name, function in self._before.items():
            setattr(dist, name, self._wrapped(name, function))
        self._relayed = Relayed.wait
        setattr(Relayed, "wait", self._waiting(Relayed.wait))  # noqa: B010

    def unwrap(self) -> None:
        """Put torch's own functions back."""
        for name, function in self._before.items():
            setattr(dist, name, function)
        setattr(Relayed, "wait", self._relayed)  # noqa: B010

    def mine(self) -> bool:
        """Whether the training thread asks: what others wait for goes on beside its computing, and counts when it waits for them."""
        return threading.get_ident() == self._owner

    def __enter__(self) -> None:
        if not self._beat.depth:
            self._since = time.perf_counter()
        self._beat.depth += 1
        self._beat.write()

    def __exit__(self, *_: Any) -> None:
        self._beat.depth -= 1
        if not self._beat.depth:
            self.seconds += time.perf_counter() - self._since
        self._beat.write()

    def _waiting(self, wait: Callable[[Relayed], None]) -> Callable[[Relayed], None]:
        """The wait for a chain of messages that other threads carry on."""

        def waited(chain: Relayed) -> None:
            with self if self.mine() else nullcontext():
                wait(chain)

        return waited

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if not self.mine():
                return function(*arguments, **options)
            if not self._beat.depth:
                self._beat.calls += 1
                self._beat.last = name
            with self:
                work = function(*arguments, **options)
            if isinstance(work, list):
                return [Waited(w, self) for w in work]
            return work if work is None or not hasattr(work, "wait") else Waited(work, self)

        return call
