"""What the reference models share: attention over packed documents, initial weights, units."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.errors import ConfigError


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, *, causal: bool) -> torch.Tensor:
    """Attention of [B, H, T, D] tensors (fewer key/value heads are shared by groups of query heads).

    documents: [B, T] numbers; tokens see only their own document.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    if causal:
        mask = mask & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def check_sizes(config: Any) -> None:
    """Raise ConfigError where heads don't divide the width, or the context is shorter than the sequence."""
    m = config.model
    if m.width % m.heads:
        raise ConfigError(f"model.width: {m.width} is not divisible by model.heads={m.heads}\n    -> choose a multiple")
    if m.kv_heads and m.heads % m.kv_heads:
        raise ConfigError(
            f"model.kv_heads: model.heads={m.heads} is not divisible by {m.kv_heads}\n    -> choose a divisor of heads"
        )
    if m.context and m.context < config.data.sequence:
        raise ConfigError(f"model.context: {m.context} is shorter than data.sequence={config.data.sequence}\n    -> raise it")
    if m.options:
        raise ConfigError(f"model.options: {m.name!r} takes none, got {sorted(m.options)}\n    -> remove them")


class Reference(nn.Module):
    """Base of the reference models: units are `blocks`, initial weights depend on the parameter's name, shape and generator."""

    blocks: nn.ModuleList
    residual: tuple[str, ...] = ()  # suffixes of weights that end a residual branch
    partita_loss = "causal"

    def __init__(self, layers: int, width: int, std: float) -> None:
        super().__init__()
        self.layers, self.width, self.std = layers, width, std

    def partita_units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of each block."""
        return [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Normal weights, ends of residual branches scaled by 1/sqrt(2 layers) (GPT-2, section 2.3); biases 0, norm weights 1."""
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            std = self.std / math.sqrt(2 * self.layers) if name.endswith(self.residual) else self.std
            tensor.normal_(0.0, std, generator=generator)

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward: 6 for each weight in a product, 12 x layers x width x sequence for attention (PaLM, appendix B)."""
        weights = sum(p.numel() for n, p in self.named_parameters() if p.dim() > 1 and "position" not in n)
        return 6.0 * weights + 12.0 * self.layers * self.width * sequence
