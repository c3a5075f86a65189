"""How the micro-batches of one update, or of an evaluation, are executed.

An executor of the slot `executor` runs them; the plan's schedule section names it (`none`: one after the other on each rank). All of
them return this rank's *part* of a sum: added over all ranks of the mesh, parts count every token once, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from partita.models.noise import Noise
from partita.plan.plan import Plan
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine

Batch = dict[str, torch.Tensor]
REPEATED = ("pipeline", "tensor")  # axes whose ranks read the same tokens


@dataclass
class StepContext:
    """What an executor is made of. No part of it knows of a command line or a run folder.

    loss: of the slot `loss`. noise: whether the model draws anything (noise of `seed`, step and sample). label_smoothing, z_loss: in
    training only.
    """

    model: nn.Module
    engine: StateEngine
    mesh: Mesh
    plan: Plan
    loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    seed: int = 0
    noise: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether tokens that this rank reads are counted here: on one of the ranks that read the same."""
        return all(self.mesh.coordinates[axis] == 0 for axis in REPEATED)

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this rank's device."""
        return {name: tensor.to(self.mesh.device, non_blocking=True) for name, tensor in batch.items()}

    def inputs(self, step: int, batch: Batch) -> dict[str, Any]:
        """What the model is called with for a batch on the device."""
        noise = Noise(self.seed, step, batch["sample"], batch.get("columns")) if self.noise and self.model.training else None
        optional = {"positions": batch.get("positions"), "documents": batch.get("documents"), "noise": noise}
        return {"input_ids": batch["input_ids"], **optional}

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum over counted tokens in float32, their number)."""
        smoothing, z_loss = (self.label_smoothing, self.z_loss) if self.model.training else (0.0, 0.0)
        return self.loss(logits, labels, label_smoothing=smoothing, z_loss=z_loss)


class Executor(Protocol):
    """Slot `executor`: made by a function (StepContext) -> Executor. All calls are collective over the ranks that share a model."""

    @property
    def whole(self) -> nn.Module:
        """A module (input_ids) -> logits of the whole model, to sample from; ranks that share a model call it together."""

    def train(self, step: int, batches: Sequence[Batch], tokens: Callable[[], int]) -> torch.Tensor:
        """Forward and backward of the micro-batches of update `step`, between the engine's begin_step and finish_gradients.

        tokens: waits for the number of counted tokens of the whole update, by which the loss is divided; called once, when the
        first loss is there. Returns this rank's part of the loss sum: float32, 0-d.
        """

    def evaluate(self, step: int, batches: Iterable[Batch]) -> torch.Tensor:
        """This rank's part of (loss sum, counted tokens) over the batches: float64 [2]. The model is in evaluation mode."""


class PlainExecutor:
    """One micro-batch after the other, each forward and backward."""

    def __init__(self, context: StepContext) -> None:
        self._context = context

    @property
    def whole(self) -> nn.Module:
        """The model itself."""
        return self._context.model

    def train(self, step: int, batches: Sequence[Batch], tokens: Callable[[], int]) -> torch.Tensor:
        """See `Executor`."""
        total = 0
        local = torch.zeros((), dtype=torch.float32, device=self._context.mesh.device)
        for i, batch in enumerate(batches):
            loss_sum, _ = self._forward(step, batch)
            total = total if i else max(tokens(), 1)
            self._context.engine.share = 1.0 / total
            self._context.engine.backward(loss_sum / total, last=i == len(batches) - 1)
            local += loss_sum.detach()
        return local if self._context.counts else local.zero_()

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[Batch]) -> torch.Tensor:
        """See `Executor`."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._context.mesh.device)
        for batch in batches:
            sums += torch.stack([value.double() for value in self._forward(step, batch)])
        return sums if self._context.counts else sums.zero_()

    def _forward(self, step: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self._context.to_device(batch)
        return self._context.loss_sum(self._context.model(**self._context.inputs(step, batch)), batch["labels"])
