"""Momentum that a rank makes of its own gradients, to be sent in their place."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Momentum:
    """m = beta m + (1 - beta) gradient, in float32, of a bucket of `elements`. The sum over ranks is the momentum of the summed gradient.

    It begins where the optimizer's own ends: whoever has a shard of that begins with it, others with nothing. seed: writes this rank's share.
    """

    def __init__(self, beta: float, elements: int, device: torch.device, seed: Callable[[torch.Tensor], None]) -> None:
        self.beta, self._seed = beta, seed
        self.own = torch.zeros(elements, dtype=torch.float32, device=device)
        self._passes = 0

    def take(self, gradient: torch.Tensor, passes: int, scale: float, *, first: bool) -> torch.Tensor:
        """Take over what one message brings of a gradient, and say what is to be sent. Where an update has several messages, their sum is the momentum.

        passes: number of the update, skipped ones counted. scale: factor on the gradient. first: of the updates that send momentum.
        """
        fresh, self._passes = passes != self._passes, passes
        if fresh and first:
            self._seed(self.own.zero_())
        if fresh:
            self.own.mul_(self.beta)
        self.own.add_(gradient, alpha=scale * (1 - self.beta))
        return self.own if fresh else gradient.mul_(scale * (1 - self.beta))
