"""A model transform: the model's output passes through a function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cap_logits(model: nn.Module, cap: float) -> nn.Module:
    """`model` with logits [B, T, V] kept within -cap to cap. In place; returns the model."""

    def hook(module: nn.Module, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(logits / cap)

    model.register_forward_hook(hook)
    return model
