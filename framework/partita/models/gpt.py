"""GPT (Radford et al. 2019): pre-norm blocks, learned positions, tanh-approximated GELU. Exports to transformers' GPT2LMHeadModel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.common import Reference, attend, check_sizes
from partita.models.noise import Noise, dropout


class GPTBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)). Input and output [B, T, width]."""

    def __init__(self, width: int, heads: int, ffn: int, drop: float, layer: int) -> None:
        super().__init__()
        self.heads, self.drop, self.layer = heads, drop, layer
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None, noise: Noise | None) -> torch.Tensor:
        """documents: [B, T] or None."""
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(c, dim=2))
        mixed = attend(q, k, v, documents, causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + dropout(self.proj(mixed), self.drop, noise, 2 * self.layer + 1)
        wide = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + dropout(self.down(wide), self.drop, noise, 2 * self.layer + 2)


class GPT(Reference):
    """Decoder-only language model. Input [B, T] token ids, output [B, T, vocab] logits."""

    residual = ("proj.weight", "down.weight")

    def __init__(
        self,
        *,
        vocab: int,
        layers: int,
        width: int,
        heads: int,
        ffn: int,
        context: int,
        tie: bool,
        drop: float = 0.0,
        std: float = 0.02,
    ) -> None:
        super().__init__(layers, width, std)
        self.drop, self.context = drop, context
        self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, ffn, drop, i) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """positions, documents: [B, T] for packed samples."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = dropout(self.embed(input_ids) + self.positions(positions), self.drop, noise, 0)
        for block in self.blocks:
            x = block(x, documents, noise)
        return self.head(self.norm(x))


def make_gpt(config: Any, vocab: int) -> GPT:
    """Builder of the slot `model`. Raises ConfigError for sizes that don't fit."""
    check_sizes(config)
    m = config.model
    context = m.context or config.data.sequence
    ffn = m.ffn or 4 * m.width
    return GPT(
        vocab=vocab, layers=m.layers, width=m.width, heads=m.heads, ffn=ffn, context=context, tie=m.tie_embeddings, drop=m.dropout,
        std=m.init_std,
    )  # fmt: skip
