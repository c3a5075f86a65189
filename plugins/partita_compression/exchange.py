"""Collectives whose messages are packets of a wire format. Quantised values are never summed on the wire: packets are exchanged,
unpacked and added in float32 in rank order, and where all ranks need the sum, packed once more.

What packing loses is kept and added to the next message where error feedback is on (Seide et al. 2014; Karimireddy et al. 2019):
the sum over steps of what was meant minus what arrived is then exactly what the errors hold, so it stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from partita.runtime.collectives import GRADIENTS, WEIGHTS, Then
from partita.runtime.mesh import Group
from partita.runtime.relay import Step
from partita.runtime.transport import Chain, Transport, Work
from partita_compression.formats import Format

ALIGN = 64  # elements; see formats


class Exchange:
    """Sums and gathers of one buffer over one group. elements: of the whole buffer. feedback: keep and send later what was lost.
    average: share of the last error that stays in the next one (LoCo, Xie et al. 2024); 0: errors are what was lost, so that nothing is for good.
    second: the same ranks with a communicator of its own, for the second message of `all_reduce`; needed where several are under way.

    Two errors where there is feedback: `sender` [elements, padded to the ranks] of what this rank sent to others, `owner` of what it
    shared of the part that it sums. The rank's own part never travels to be summed, so it loses nothing there; what a load has put
    into its error is delivered with the next message.
    """

    def __init__(
        self,
        format: Format,
        group: Group,
        elements: int,
        transport: Transport,
        device: torch.device,
        *,
        feedback: bool,
        shared: bool,
        average: float = 0.0,
        second: Group | None = None,
    ) -> None:
        self.format, self.group, self.transport, self.average = format, group, transport, average
        self.second = second or group
        self.part = -(-elements // (group.size * ALIGN)) * ALIGN if shared else elements // group.size
        self.errors: dict[str, torch.Tensor] = {}
        self.holes: dict[str, list[tuple[int, int]]] = {}  # ranges of an error for nothing but padding, which loses nothing
        if feedback:
            self.errors["sender"] = torch.zeros(self.part * group.size, dtype=torch.float32, device=device)
            if shared:
                self.errors["owner"] = torch.zeros(self.part, dtype=torch.float32, device=device)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, *, accumulate: bool) -> Work:
        """output [part] (+)= the sum over ranks of their part for this rank of source [size * part], which must stay until the wait."""
        n, rank, size = self.group.size, self.group.rank, self.format.size(self.part)
        rows, own = self._meant(source)
        packets = torch.empty(n, size, dtype=torch.uint8, device=source.device)
        for i in range(n):
            if i != rank:
                self.format.encode(rows[i], packets[i])
                self._keep("sender", rows[i], packets[i], source.view(n, -1)[i])
        self._fill_holes("sender")
        received = torch.empty_like(packets)
        work = self.transport.all_to_all(received, packets, self.group, GRADIENTS)
        return Then([work], lambda: self._sum(output, received, own, accumulate))

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        """Sum of a buffer [elements] over the group, in place and bit-identical on all ranks."""
        steps, finish = self.steps(buffer)
        if self.second is self.group:  # both messages in the order of all others of the group: the second one at the wait
            return Chain(steps, finish)
        return self.transport.chain(steps, buffer.device, GRADIENTS, finish)

    def steps(self, buffer: torch.Tensor) -> tuple[list[Step], Callable[[], None]]:
        """The two messages of `all_reduce`, and what there is to do when the second one has arrived."""
        n, rank = self.group.size, self.group.rank
        source = buffer
        packets = torch.empty(n, self.format.size(self.part), dtype=torch.uint8, device=buffer.device)
        total = torch.empty(self.part, dtype=torch.float32, device=buffer.device)

        def scatter() -> Work:
            nonlocal source
            if buffer.numel() != n * self.part:
                source = buffer.new_zeros(n * self.part)
                source[: buffer.numel()].copy_(buffer)
            return self.reduce_scatter(total, source, accumulate=False)

        def share() -> Work:
            if "owner" in self.errors:
                self.errors["owner"].add_(total)
                self.format.encode(self.errors["owner"], packets[rank])
                self._keep("owner", self.errors["owner"], packets[rank], total)
                self._fill_holes("owner")
            else:
                self.format.encode(total, packets[rank])
            return self.transport.share(packets.unbind(), self.second, GRADIENTS)

        def finish() -> None:
            unpack(self.format, packets, source)
            if source is not buffer:
                buffer.copy_(source[: buffer.numel()])

        return [scatter, share], finish

    def _meant(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank means to send, by receiver, and the part that stays here."""
        rows = source.view(self.group.size, self.part)
        own = rows[self.group.rank]
        if "sender" not in self.errors:
            return rows, own
        meant = self.errors["sender"].add_(source).view(self.group.size, self.part)
        own = meant[self.group.rank].clone()
        meant[self.group.rank].zero_()
        return meant, own

    def _keep(self, name: str, meant: torch.Tensor, packet: torch.Tensor, new: torch.Tensor) -> None:
        """Turn what was meant, which is the last error and what is new, into the next error, in place."""
        if name not in self.errors:
            return
        arrived = torch.empty_like(meant)
        self.format.decode(packet, arrived)
        meant.sub_(arrived, alpha=1 - self.average)
        if self.average:
            meant.sub_(new, alpha=self.average)

    def _fill_holes(self, name: str) -> None:
        for lo, hi in self.holes.get(name, ()):
            self.errors[name][lo:hi] = 0

    def clean(self) -> None:
        """A message that wasn't finite leaves no error: its update was skipped."""
        for error in self.errors.values():
            torch.nan_to_num_(error, 0.0, 0.0, 0.0)

    def _sum(self, output: torch.Tensor, received: torch.Tensor, own: torch.Tensor, accumulate: bool) -> None:
        wide = output if output.dtype == torch.float32 else output.float()
        if not accumulate:
            wide.zero_()
        for i, packet in enumerate(received):
            if i == self.group.rank:
                wide.add_(own)
            else:
                self.format.decode(packet, wide, add=True)
        if wide is not output:
            output.copy_(wide)


def gather(format: Format, transport: Transport, whole: torch.Tensor, group: Group) -> Work:
    """Fill whole [size * n]; the caller has written part `group.rank`. All parts, this rank's too, come back as packed: bit-identical
    on all ranks."""
    mine = whole.view(group.size, -1)[group.rank]
    packets = torch.empty(group.size, format.size(mine.numel()), dtype=torch.uint8, device=whole.device)
    format.encode(mine, packets[group.rank])
    return Then([transport.share(packets.unbind(), group, WEIGHTS)], lambda: unpack(format, packets, whole))


def unpack(format: Format, packets: torch.Tensor, whole: torch.Tensor) -> None:
    """Write all packets, end to end."""
    for packet, part in zip(packets, whole.view(packets.shape[0], -1), strict=True):
        format.decode(packet, part)
