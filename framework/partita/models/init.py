"""Initial weights: a function of the parameter's name and the seed, so that no layout changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from partita.runtime.rng import name_generator

# Projections that write into the residual stream, in all reference models
RESIDUAL = ("attention.out.weight", ".down.weight", ".experts.down")


def draw(name: str, tensor: torch.Tensor, generator: torch.Generator, std: float, residual_std: float | None = None) -> None:
    """Fill one whole parameter in place: biases 0, norms 1, matrices normal (`RESIDUAL`: with `residual_std`).

    GPT-2 (Radford et al. 2019, section 2.3) scales the latter by 1/sqrt(number of branches), so their sum keeps its size.
    """
    with torch.no_grad():
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.ndim < 2:
            tensor.fill_(1.0)
        else:
            residual = residual_std is not None and name.endswith(RESIDUAL)
            tensor.normal_(0.0, residual_std if residual and residual_std is not None else std, generator=generator)


def initialize(model: Any, seed: int) -> nn.Module:
    """The model with the initial weights that a run of any layout begins with, on the CPU whatever device it stood on.

    model: any module with `init_parameter(name, tensor, generator)`. Tied parameters are drawn once, under their first name.
    """
    return fill(model, lambda name, tensor: model.init_parameter(name, tensor, name_generator(seed, name)))


def fill(model: nn.Module, write: Callable[[str, torch.Tensor], None]) -> nn.Module:
    """Give a model on the meta device memory on the CPU, and each parameter its values: write(name, float32 tensor) in place."""
    for module in model.modules():
        init_buffers = getattr(module, "init_buffers", None)
        if init_buffers is not None:
            init_buffers(torch.device("cpu"))
    done: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for attribute, old in list(module._parameters.items()):
            if old is None:
                continue
            if id(old) not in done:
                value = torch.empty(old.shape, dtype=torch.float32)
                write(f"{prefix}.{attribute}" if prefix else attribute, value)
                done[id(old)] = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
            module._parameters[attribute] = done[id(old)]
    return model
