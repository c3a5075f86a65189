"""Experts that begin as copies of a trained dense layer (Komatsuzaki et al. 2022, Sparse Upcycling)."""

from __future__ import annotations

from typing import Any

import torch

from partita.errors import ConfigError
from partita.runtime.rng import name_generator
from partita.state.slices import StateSlice
from partita.train.index import find_checkpoint, read_index
from partita.train.loading import fill

# a parameter of the experts -> the one of the dense layer, and whether it is stored the other way round
ORIGINS = {
    "experts.up": ("up.weight", True),
    "experts.up_bias": ("up.bias", False),
    "experts.gate_up": ("gate_up.weight", True),
    "experts.down": ("down.weight", True),
    "experts.down_bias": ("down.bias", False),
}


class Upcycled:
    """Initial weights of a model with experts out of a checkpoint of the dense one: read by name, experts copied, routers drawn.

    The first loss is the one that the dense model ended with: all experts are alike, and the gates of the routings that this is for sum
    to one. Raises ConfigError where the checkpoint lacks a weight or has it in another shape.
    """

    def __init__(self, model: Any, checkpoint: str, seed: int) -> None:
        self._draw, self._seed = model.init_parameter, seed
        self._index = read_index(find_checkpoint(checkpoint))

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole parameter `name`."""
        if name.endswith(".mlp.router"):
            tensor = torch.empty(shape)
            self._draw(name, tensor, name_generator(self._seed, name))
            return tensor
        layer, _, own = name.partition(".mlp.")
        if own not in ORIGINS:
            return self._stored(name, shape)
        origin, turned = ORIGINS[own]
        one = shape[:0:-1] if turned else shape[1:]
        dense = self._stored(f"{layer}.mlp.{origin}", one)
        return (dense.t() if turned else dense).expand(shape)

    def _stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        entry = self._index.tensors.get(f"model.{name}")
        if entry is None or tuple(entry.shape) != tuple(shape):
            found = "lacks it" if entry is None else f"has {list(entry.shape)}"
            raise ConfigError(
                f"moe.upcycle: {name!r} should have shape {list(shape)}, and {self._index.path} {found}\n"
                "    -> the sizes of the dense run (model.*, moe.ffn=null), or another checkpoint"
            )
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        fill(self._index, [StateSlice(f"model.{name}", entry.shape, entry.dtype, 0, entry.numel, tensor.view(-1))])
        return tensor
