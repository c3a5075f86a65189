"""Chains of messages that go on by themselves: the second message of a chain leaves as soon as the first one has arrived, while the
caller computes. For backends whose messages are waited for on the host (gloo); on accelerators the stream does that.

The first message is sent by the caller. What follows the message number k of a chain is done by thread k, chain after chain in the
order in which they were begun. So the messages of one position are sent in the same order on all ranks, whatever else they do, as long as
each position has a communicator of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Work(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Blocks (or, on an accelerator, makes the stream wait) until the result is there."""


Step = Callable[[], Work]


class Relayed:
    """A chain under way."""

    def __init__(self, steps: Sequence[Step], finish: Callable[[], None] | None) -> None:
        self.steps, self.finish = list(steps), finish
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Until all is done. Raises what a step raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Relay:
    """The threads of one process, started when they are needed. They hold nothing open: a process may end with them."""

    def __init__(self) -> None:
        self._lines: list[queue.SimpleQueue[tuple[Relayed, Work] | None]] = []

    def start(self, steps: Sequence[Step], finish: Callable[[], None] | None = None) -> Relayed:
        """Send the first message now, the others one after the other behind it, then run `finish`."""
        chain = Relayed(steps[1:], finish)
        self._pass(0, chain, steps[0]())
        return chain

    def close(self) -> None:
        """End the threads; a later chain starts new ones."""
        lines, self._lines = self._lines, []
        for line in lines:
            line.put(None)

    def _pass(self, position: int, chain: Relayed, work: Work) -> None:
        while len(self._lines) <= position:
            self._lines.append(queue.SimpleQueue())
            arguments = (self._lines[-1], len(self._lines))
            threading.Thread(target=self._work, args=arguments, daemon=True, name="partita-relay").start()
        self._lines[position].put((chain, work))

    def _work(self, line: queue.SimpleQueue[tuple[Relayed, Work] | None], following: int) -> None:
        with torch.no_grad():
            while (item := line.get()) is not None:
                self._one(following, *item)

    def _one(self, following: int, chain: Relayed, work: Work) -> None:
        try:
            work.wait()
            if chain.steps:
                self._pass(following, chain, chain.steps.pop(0)())
                return
            if chain.finish is not None:
                chain.finish()
        except BaseException as error:  # whoever waits for the chain gets it
            chain.error = error
        chain.finish = None
        chain.steps.clear()
        chain.done.set()
