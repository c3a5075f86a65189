"""Splits the backward of matrix products: the gradient of the input now, that of the weights when the schedule asks for it.

Zero-bubble schedules (Qi et al. 2023) fill waiting ranks with the second half. Only products are split; what else has weights (norms,
embeddings) costs little and is done with the first half. Autograd's graph is never walked, and recomputed blocks are recomputed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Gradient = torch.Tensor | Callable[[], torch.Tensor]
Stash = list[tuple[nn.Parameter, Gradient]]


class Deferral:
    """Where the second half of backward is put while one is open."""

    def __init__(self) -> None:
        self._stash: Stash | None = None

    @contextmanager
    def into(self, stash: Stash) -> Iterator[None]:
        """Backward inside leaves the gradients of weights in `stash`, to be computed by a call."""
        self._stash = stash
        try:
            yield
        finally:
            self._stash = None

    def put(self, parameter: nn.Parameter, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """The gradient if no stash is open, else None, which tells autograd that none comes by this way."""
        if self._stash is None:
            return compute()
        # what was saved is a view of what the forward computed: outside of backward, products of it would begin a graph
        self._stash.append((parameter, torch.no_grad()(compute)))
        return None

    def install(self, module: nn.Module) -> None:
        """Split every product inside `module` that is a plain one; those that a transform has changed keep their own backward."""
        for part in module.modules():
            transposed = type(part).__name__ == "Conv1D" and type(part).__module__ == "transformers.pytorch_utils"
            plain = isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward
            if (transposed or plain) and "forward" not in vars(part):
                part.forward = self._forward(part, transposed)  # type: ignore[method-assign]

    def _forward(self, part: nn.Module, transposed: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            return _Product.apply(x, part.weight, part.bias, transposed, self)

        return forward


class _Product(torch.autograd.Function):
    """x [..., in] -> x @ W' + b [..., out], W [out, in] (or, `transposed`, [in, out] used as it is)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool, deferral: Deferral
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.deferral, ctx.weight, ctx.bias = transposed, deferral, weight, bias
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = g @ (weight.t() if ctx.transposed else weight)
        rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        if ctx.needs_input_grad[1]:
            left, right = (rows, grads) if ctx.transposed else (grads, rows)
            dw = ctx.deferral.put(ctx.weight, lambda: left.t() @ right)
        if ctx.needs_input_grad[2]:
            db = ctx.deferral.put(ctx.bias, lambda: grads.sum(0))
        return dx, dw, db, None, None
