"""What runs: forward of chosen modules under torch's activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita.plan.model_spec import inspect_model
from partita.plan.plan import Activations


def recompute(model: nn.Module, activations: Activations) -> nn.Module:
    """Make the chosen modules keep their inputs only. The model is changed in place; names, hooks and weights stay."""
    for name in chosen(model, activations):
        module = model.get_submodule(name)
        module.forward = checkpointed(module.forward)  # type: ignore[method-assign]
    return model


def chosen(model: nn.Module, activations: Activations) -> list[str]:
    """Full names of the modules whose forward is run again in backward."""
    spec = inspect_model(model)
    whole = [unit for unit in spec.blocks if activations.of(unit) == "full"]
    partly = {unit for unit in spec.blocks if activations.of(unit) == "selective"}
    inner = spec.matching_modules(activations.patterns) if partly else []
    return whole + [name for name in inner if any(name.startswith(unit + ".") for unit in partly)]


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that keeps its inputs and nothing else.

    Only `forward` is replaced, so hooks on the module run once: the engine gathers weights before the module runs and before its
    backward begins, and the second forward pass finds them there. Without gradients it is the forward itself.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
