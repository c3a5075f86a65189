"""Messages between stages: activations forward, their gradients back, each way on a communicator of its own.

A pair of ranks sends its messages in the order of the sender's actions, which the receiver knows too. It takes them in that order, so no
backend has to match by tags, and asks for the next one ahead. Nothing waits while it sends, so valid orders can't lock each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from partita.errors import PartitaError
from partita.runtime.mesh import Group, Mesh
from partita.runtime.traffic import sending, sent
from partita_parallel.pipeline_order import BACKWARD, FORWARD, INPUT, Action, Orders

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER = 8  # dtype, number of dimensions, up to six sizes

Message = Action  # kind FORWARD: activations for `stage`; BACKWARD: gradients for `stage`
Form = tuple[tuple[int, ...], torch.dtype]


def sent_by(action: Action, place: Sequence[int]) -> tuple[Message, int] | None:
    """The message that an action sends and the rank it goes to; None where its result stays on the rank."""
    step = {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(action.kind, 0)
    to = action.stage + step
    if not step or not 0 <= to < len(place) or place[to] == place[action.stage]:
        return None
    return Message(FORWARD if step > 0 else BACKWARD, to, action.micro), place[to]


class Link:
    """All messages of one rank for one set of orders.

    varying: micro-batches may differ in shape; else the shape of the first is that of all.
    """

    def __init__(self, mesh: Mesh, orders: Orders, place: Sequence[int], *, varying: bool = False) -> None:
        self._rank, self._device = mesh.coordinates["pipeline"], mesh.device
        self._up, self._down = mesh.group(("pipeline",), lane=1), mesh.group(("pipeline",), lane=2)
        self._varying = varying
        self._forms: dict[int, Form] = {}  # of the activations that each stage takes
        self._expected: dict[int, list[Message]] = {}
        self._source: dict[Message, int] = {}
        for rank, actions in orders.items():
            for action in actions:
                found = sent_by(action, place)
                if found is not None and found[1] == self._rank:
                    self._expected.setdefault(rank, []).append(found[0])
                    self._source[found[0]] = rank
        self._place = tuple(place)
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self.begin()

    def begin(self) -> None:
        """Before the first action of the orders."""
        self._next = dict.fromkeys(self._expected, 0)
        self._posted: dict[Message, tuple[Any, torch.Tensor]] = {}

    def end(self) -> None:
        """After the last action: all that was sent has arrived."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start to send a tensor to the rank of the message's stage."""
        tensor = tensor.detach().contiguous()
        peer = self._place[message.stage]
        if message.kind == FORWARD:
            form = (tuple(tensor.shape), tensor.dtype)
            known = None if self._varying else self._forms.get(message.stage)
            if known is not None and known != form:
                raise PartitaError(f"a micro-batch gives activations {form} where others gave {known}; pad them to one shape")
            if known is None:
                sizes = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
                header = torch.tensor(sizes + [0] * (HEADER - len(sizes)), dtype=torch.int64, device=self._device)
                self._start(header, peer)
            self._forms[message.stage] = form
        self._sending = [(work, held) for work, held in self._sending if not work.is_completed()]
        self._start(tensor, peer)

    def receive(self, message: Message) -> torch.Tensor:
        """The tensor of a message for one of this rank's stages; waits for it."""
        source = self._source[message]
        while message not in self._posted:
            self._post(source)
        work, tensor = self._posted.pop(message)
        work.wait()
        following = self._expected[source][self._next[source] :][:1]
        if following and self._known(following[0]):
            self._post(source)
        return tensor

    def _known(self, message: Message) -> bool:
        return not self._varying and self._form_key(message) in self._forms

    def _form_key(self, message: Message) -> int:
        """Gradients for a stage have the form of what it has sent, which is what the stage after it takes."""
        return message.stage if message.kind == FORWARD else message.stage + 1

    def _post(self, source: int) -> None:
        message = self._expected[source][self._next[source]]
        self._next[source] += 1
        key, group = self._form_key(message), self._group(source, self._rank)
        if message.kind == FORWARD and not self._known(message):
            header = torch.zeros(HEADER, dtype=torch.int64, device=self._device)
            with sending("pipeline", 0):
                dist.recv(header, group.ranks[source], group=group.process_group)
            code, ndim, *sizes = header.tolist()
            self._forms[key] = (tuple(sizes[:ndim]), DTYPES[code])
        shape, dtype = self._forms[key]
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        work = sent("pipeline", 0, dist.irecv(buffer, group.ranks[source], group=group.process_group), buffer)
        self._posted[message] = (work, buffer)

    def _start(self, tensor: torch.Tensor, peer: int) -> None:
        group = self._group(self._rank, peer)
        work = dist.isend(tensor, group.ranks[peer], group=group.process_group)
        size = tensor.numel() * tensor.element_size()
        self._sending.append((sent("pipeline", size, work, tensor), tensor))

    def _group(self, source: int, to: int) -> Group:
        """By direction of travel: what goes up never waits for what comes down."""
        return self._up if to > source else self._down
