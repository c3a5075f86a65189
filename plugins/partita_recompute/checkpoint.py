"""What runs: forward of chosen modules under torch's activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from partita.plan.model_spec import inspect_model
from partita.plan.operators import keeps
from partita.plan.plan import Activations


def recompute(model: nn.Module, activations: Activations) -> nn.Module:
    """Make the chosen modules keep their inputs only, or the outputs of some operators too. The model is changed in place; names, hooks
    and weights stay."""
    for name in chosen(model, activations):
        module = model.get_submodule(name)
        operators = activations.operators if activations.of(name) == "operators" else ()
        module.forward = checkpointed(module.forward, operators)  # type: ignore[method-assign]
    return model


def chosen(model: nn.Module, activations: Activations) -> list[str]:
    """Full names of the modules whose forward is run again in backward."""
    spec = inspect_model(model)
    whole = [unit for unit in spec.blocks if activations.of(unit) in ("full", "operators")]
    partly = {unit for unit in spec.blocks if activations.of(unit) == "selective"}
    inner = spec.matching_modules(activations.patterns) if partly else []
    return whole + [name for name in inner if any(name.startswith(unit + ".") for unit in partly)]


def checkpointed(forward: Callable[..., Any], operators: Sequence[str] = ()) -> Callable[..., Any]:
    """`forward` that keeps its inputs and the outputs of `operators`, and nothing else.

    Only `forward` is replaced, so hooks on the module run once: the engine gathers weights before the module runs and before its
    backward begins, and the second forward pass finds them there. Without gradients it is the forward itself.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    more: Any = {"context_fn": partial(create_selective_checkpoint_contexts, _policy(operators))} if operators else {}
    return run


def _policy(operators: Sequence[str]) -> Callable[..., CheckpointPolicy]:
    """What to do with the output of an operator; each is looked up once."""

    @cache
    def decide(operator: Any) -> CheckpointPolicy:
        name = getattr(operator, "overloadpacket", operator).__name__
        return CheckpointPolicy.MUST_SAVE if keeps(name, operators) else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda _context, operator, *_args, **_kwargs: decide(operator)
