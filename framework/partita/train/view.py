"""What one rank sees of samples and outputs. Transforms that cut samples or logits register here how; the loop asks in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
Loss = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass
class View:
    """Filled by transforms, in their order.

    batches: from a batch of whole samples to this rank's part of it, which tells the tokens it holds: `columns` (int64 [T]) and
    `positions`. losses: from a loss of whole logits to one of what this rank's model returns. switches: make contexts in which
    the model takes whole samples and returns whole logits on every rank, as for generation.
    """

    batches: list[Callable[[Batch], Batch]] = field(default_factory=list)
    losses: list[Callable[[Loss], Loss]] = field(default_factory=list)
    switches: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)

    def batch(self, batch: Batch) -> Batch:
        """This rank's part of a batch."""
        for cut in self.batches:
            batch = cut(batch)
        return batch

    def loss(self, loss: Loss) -> Loss:
        """The loss for this rank's outputs."""
        for adapt in self.losses:
            loss = adapt(loss)
        return loss

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model takes and gives whole values; the ranks that share it call it together."""
        with ExitStack() as stack:
            for switch in self.switches:
                stack.enter_context(switch())
            yield
