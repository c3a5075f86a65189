"""Momentum that a rank makes of its own gradients, to be sent in their place."""

from __future__ import annotations

import torch


class Momentum:
    """m = beta m + (1 - beta) gradient, in float32, of a bucket of `elements`. The sum over ranks is the momentum of the summed gradient."""

    def __init__(self, beta: float, elements: int, device: torch.device) -> None:
        self.beta = beta
        self.own = torch.zeros(elements, dtype=torch.float32, device=device)
        self._passes = 0

    def take(self, gradient: torch.Tensor, passes: int, *, native: bool) -> torch.Tensor:
        """Take over what one message brings of a gradient, and say what is to be sent: the gradient, as long as it travels natively.

        passes: number of the update, skipped ones counted. Where an update has several messages, their sum is the momentum.
        """
        fresh, self._passes = passes != self._passes, passes
        if fresh:
            self.own.mul_(self.beta)
        self.own.add_(gradient, alpha=1 - self.beta)
        if native:
            return gradient
        return self.own if fresh else gradient.mul_(1 - self.beta)
