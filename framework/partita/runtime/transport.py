"""The messages under the collectives: what is really sent, by purpose. Two of them: one that counts and times, and one that doesn't."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from partita.runtime.mesh import Group
from partita.runtime.relay import Relay, Step, Work
from partita.runtime.traffic import Tally, Traffic, outside

__all__ = ["All", "Chain", "LoggedTransport", "Tally", "Transport", "Work"]


class Transport:
    """Asynchronous messages among the ranks of a group of two or more. purpose: for the log, such as `gradient_reduce`.

    This one keeps no log, and does nothing for one: each message is the backend's call alone.
    """

    def __init__(self) -> None:
        self._relay = Relay()

    def take(self) -> dict[str, Tally]:
        """What was sent since the last call, by purpose: nobody counts."""
        return {}

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, group: Group, purpose: str) -> Work:
        """Part i of `sent` goes to rank i, whose part for this rank lands at i of `received`."""
        return dist.all_to_all_single(received, sent, group=group.process_group, async_op=True)

    def swap(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: Group, purpose: str) -> Work:
        """The same from rank to rank: part i of `sent` goes to rank i, whose part lands in part i of `received`; this rank's own stay.

        On gloo it spares the copy of a rank's own part, and a thread that waits.
        """
        others = [(i, r) for i, r in enumerate(group.ranks) if i != group.rank]
        operations = [dist.P2POp(dist.irecv, received[i], r, group.process_group) for i, r in others]
        operations += [dist.P2POp(dist.isend, sent[i], r, group.process_group) for i, r in others]
        return All(dist.batch_isend_irecv(operations))

    def share(self, parts: Sequence[torch.Tensor], group: Group, purpose: str) -> Work:
        """Every rank gets each rank's part, in place: one broadcast from each owner, which on gloo beats its all-gather."""
        return All([self._broadcast(part, i, group, purpose) for i, part in enumerate(parts)])

    def _broadcast(self, part: torch.Tensor, owner: int, group: Group, purpose: str) -> Work:
        return dist.broadcast(part, group.ranks[owner], group=group.process_group, async_op=True)

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor, group: Group, purpose: str) -> Work:
        """The backend's own all-gather into `whole`."""
        return dist.all_gather_into_tensor(whole, mine, group=group.process_group, async_op=True)

    def reduce_scatter(self, mine: torch.Tensor, whole: torch.Tensor, group: Group, purpose: str) -> Work:
        """The backend's own reduce-scatter (sum)."""
        return dist.reduce_scatter_tensor(mine, whole, group=group.process_group, async_op=True)

    def all_reduce(self, buffer: torch.Tensor, group: Group, purpose: str) -> Work:
        """The backend's own all-reduce (sum), in place."""
        return dist.all_reduce(buffer, group=group.process_group, async_op=True)

    def chain(self, steps: Sequence[Step], device: torch.device, purpose: str, finish: Callable[[], None] | None = None) -> Work:
        """Messages that follow one another, each sent when the one before it has arrived; then `finish`. The first is sent now.

        Where the host waits for messages (a CPU), threads carry the chain on while the caller computes: each step must then use a
        communicator of its own position (`partita.runtime.relay`). Elsewhere it goes on at the wait.
        """
        return self._relay.start(steps, finish) if device.type == "cpu" else Chain(steps, finish)

    def close(self) -> None:
        """End the threads."""
        self._relay.close()


class All:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()


class Chain:
    """Works one after the other: each begins when the one before it is done, the first one at once, the others in the wait."""

    def __init__(self, starts: Sequence[Step], finish: Callable[[], None] | None = None) -> None:
        self._starts, self._finish = list(starts[1:]), finish
        self._work = starts[0]()

    def wait(self) -> None:
        """Wait for all, then finish, once."""
        self._work.wait()
        while self._starts:
            self._work = self._starts.pop(0)()
            self._work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class LoggedTransport(Transport):
    """Counts and times what it sends. On an accelerator a wait only orders streams, so its times say little there."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        super().__init__()
        self.traffic = traffic or Traffic()
        self._arrivals = Relay()

    def take(self) -> dict[str, Tally]:
        """What was sent since the last call, by purpose."""
        return self.traffic.take()

    def chain(self, steps: Sequence[Step], device: torch.device, purpose: str, finish: Callable[[], None] | None = None) -> Work:
        """See `Transport`."""
        return self.traffic.waited(purpose, super().chain(steps, device, purpose, finish))

    def close(self) -> None:
        """See `Transport`."""
        super().close()
        self._arrivals.close()

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, group: Group, purpose: str) -> Work:
        """See `Transport`."""
        self.traffic.begin(purpose, outside(sent, group))
        return self.traffic.under_way(purpose, super().all_to_all(received, sent, group, purpose), (received, sent))

    def swap(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: Group, purpose: str) -> Work:
        """See `Transport`."""
        self.traffic.begin(purpose, sum(p.nbytes for i, p in enumerate(sent) if i != group.rank))
        work = super().swap(received, sent, group, purpose)
        if received[0].device.type != "cpu":
            return self.traffic.under_way(purpose, work, (received, sent))
        # messages between two ranks tell nobody when they arrive: a thread waits for them
        relayed = self._arrivals.start([lambda: work], lambda: self.traffic.end(purpose))
        return self.traffic.waited(purpose, relayed)

    def _broadcast(self, part: torch.Tensor, owner: int, group: Group, purpose: str) -> Work:
        self.traffic.begin(purpose, part.nbytes * (group.size - 1) if owner == group.rank else 0)
        return self.traffic.under_way(purpose, super()._broadcast(part, owner, group, purpose), (part,))

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor, group: Group, purpose: str) -> Work:
        """See `Transport`."""
        self.traffic.begin(purpose, mine.nbytes * (group.size - 1))
        return self.traffic.under_way(purpose, super().all_gather(whole, mine, group, purpose), (whole, mine))

    def reduce_scatter(self, mine: torch.Tensor, whole: torch.Tensor, group: Group, purpose: str) -> Work:
        """See `Transport`."""
        self.traffic.begin(purpose, outside(whole, group))
        return self.traffic.under_way(purpose, super().reduce_scatter(mine, whole, group, purpose), (mine, whole))

    def all_reduce(self, buffer: torch.Tensor, group: Group, purpose: str) -> Work:
        """See `Transport`. Counted as a ring sends it: twice (n - 1) / n of the buffer."""
        self.traffic.begin(purpose, 2 * outside(buffer, group))
        return self.traffic.under_way(purpose, super().all_reduce(buffer, group, purpose), (buffer,))
