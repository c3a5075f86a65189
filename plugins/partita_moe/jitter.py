"""Jitter of the router (Fedus et al. 2022, section 2.4): in training its input is multiplied by numbers drawn evenly around one.

Whether and what is drawn is decided by the `Noise` that blocks are given for dropout. An expert layer is called with activations only, so its block
leaves the noise with it, and a hook makes it an argument of the call: one that runs outside of what is run again in backward, whether that
is the block or the layer alone, and whichever micro-batch has passed since.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.errors import ConfigError
from partita.models.noise import Noise, uniform

if TYPE_CHECKING:
    from partita_moe.layer import ExpertLayer

Tensor = torch.Tensor
PLACES = 1 << 32  # the first place that draws numbers for a router; those before are dropout's


def jittered(x: Tensor, width: float, noise: Noise | None, block: int) -> Tensor:
    """x [B, T, C], float32 or wider, times numbers from 1 - width to 1 + width. Without noise, or with width 0, x itself."""
    if noise is None or width == 0.0 or not x.numel():
        return x
    return x * (1.0 + width * uniform(x, noise, PLACES + block))


def bring_noise(block: nn.Module, layer: ExpertLayer) -> None:
    """Have `block` give `layer`, which lies in it, its own argument `noise`. Raises ConfigError for a block without one."""
    forward = block.forward
    signature = inspect.signature(forward)
    if "noise" not in signature.parameters:
        raise ConfigError(
            f"moe.jitter: {type(block).__name__}.forward takes no argument `noise`, so ranks would not draw the same numbers\n    -> moe.jitter=0"
        )

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        layer.noise = signature.bind(*args, **kwargs).arguments.get("noise")
        try:
            return forward(*args, **kwargs)
        finally:
            layer.noise = None

    block.forward = run  # type: ignore[method-assign]
    layer.register_forward_pre_hook(_hand_on, with_kwargs=True)


def _hand_on(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "noise": layer.noise}
