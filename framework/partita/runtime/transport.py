"""The messages under the collectives: what is really sent, by purpose. One place to count and time them; counting is off by default."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group


class Work(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Blocks (or, on an accelerator, makes the stream wait) until the result is there."""


class Transport:
    """Asynchronous messages among the ranks of a group of two or more. purpose: for the log, such as `gradient_reduce`."""

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, group: Group, purpose: str) -> Work:
        """Part i of `sent` goes to rank i, whose part for this rank lands at i of `received`."""
        return self._note(purpose, _outside(sent, group), dist.all_to_all_single, received, sent, group=group.process_group)

    def swap(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: Group, purpose: str) -> Work:
        """The same from rank to rank: part i of `sent` goes to rank i, whose part lands in part i of `received`; this rank's own stay.

        On gloo it spares the copy of a rank's own part, and a thread that waits.
        """
        call = partial(_swap, ranks=group.ranks, rank=group.rank)
        size = sum(p.numel() * p.element_size() for i, p in enumerate(sent) if i != group.rank)
        return self._note(purpose, size, call, received, sent, group=group.process_group)

    def share(self, parts: Sequence[torch.Tensor], group: Group, purpose: str) -> Work:
        """Every rank gets each rank's part, in place: one broadcast from each owner, which on gloo beats its all-gather."""
        mine = parts[group.rank]
        size = mine.numel() * mine.element_size() * (group.size - 1)
        works = [
            self._note(purpose, size if i == group.rank else 0, dist.broadcast, parts[i], r, group=group.process_group)
            for i, r in enumerate(group.ranks)
        ]
        return All(works)

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor, group: Group, purpose: str) -> Work:
        """The backend's own all-gather into `whole`."""
        size = mine.numel() * mine.element_size() * (group.size - 1)
        return self._note(purpose, size, dist.all_gather_into_tensor, whole, mine, group=group.process_group)

    def reduce_scatter(self, mine: torch.Tensor, whole: torch.Tensor, group: Group, purpose: str) -> Work:
        """The backend's own reduce-scatter (sum)."""
        return self._note(purpose, _outside(whole, group), dist.reduce_scatter_tensor, mine, whole, group=group.process_group)

    def all_reduce(self, buffer: torch.Tensor, group: Group, purpose: str) -> Work:
        """The backend's own all-reduce (sum), in place. Counted as a ring sends it: twice (n - 1) / n of the buffer."""
        return self._note(purpose, 2 * _outside(buffer, group), dist.all_reduce, buffer, group=group.process_group)

    def _note(self, purpose: str, size: int, call: Any, *tensors: Any, group: Any) -> Work:
        return call(*tensors, group=group, async_op=True)


def _swap(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], ranks: Sequence[int], rank: int, group: Any, async_op: bool
) -> Work:
    others = [(i, r) for i, r in enumerate(ranks) if i != rank]
    operations = [dist.P2POp(dist.irecv, received[i], r, group) for i, r in others]
    operations += [dist.P2POp(dist.isend, sent[i], r, group) for i, r in others]
    return All(dist.batch_isend_irecv(operations))


def _outside(buffer: torch.Tensor, group: Group) -> int:
    return buffer.numel() * buffer.element_size() * (group.size - 1) // group.size


class All:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()


@dataclass
class Tally:
    """Of one purpose. bytes: sent by this rank to others. seconds: from start to the end of the wait, so computing in between counts
    too. exposed: seconds that this rank stood waiting; the rest was hidden behind computing."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass
class LoggedTransport(Transport):
    """Counts and times what it sends. On an accelerator a wait only orders streams, so its exposed time says little there."""

    tallies: dict[str, Tally] = field(default_factory=dict)

    def take(self) -> dict[str, Tally]:
        """What was sent since the last call, by purpose."""
        taken, self.tallies = self.tallies, {}
        return taken

    def _note(self, purpose: str, size: int, call: Any, *tensors: Any, group: Any) -> Work:
        tally = self.tallies.setdefault(purpose, Tally())
        tally.calls += size > 0  # a broadcast of somebody else's part is none of ours
        tally.bytes += size
        start = time.perf_counter()
        work = call(*tensors, group=group, async_op=True)
        return _Timed(work, self, purpose, start, tensors)


class _Timed:
    """Holds the tensors too: a message must not outlive its buffers."""

    def __init__(self, work: Work, log: LoggedTransport, purpose: str, start: float, tensors: Any) -> None:
        self._work, self._log, self._purpose, self._start, self._tensors = work, log, purpose, start, tensors

    def wait(self) -> None:
        before = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        tally = self._log.tallies.setdefault(self._purpose, Tally())
        tally.seconds += now - self._start
        tally.exposed += now - before
