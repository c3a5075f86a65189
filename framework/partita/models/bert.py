"""BERT (Devlin et al. 2018) as a masked language model: post-norm blocks, exact GELU, one token type."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.common import Reference, attend, check_sizes
from partita.models.noise import Noise, dropout

EPS = 1e-12


class BertBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + feed-forward(x)). Input and output [B, T, width]."""

    def __init__(self, width: int, heads: int, ffn: int, drop: float, layer: int) -> None:
        super().__init__()
        self.heads, self.drop, self.layer = heads, drop, layer
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)

    def forward(self, x: torch.Tensor, documents: torch.Tensor | None, noise: Noise | None) -> torch.Tensor:
        """documents: [B, T] or None."""
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).split(c, dim=2))
        mixed = attend(q, k, v, documents, causal=False).transpose(1, 2).reshape(b, t, c)
        x = self.norm1(x + dropout(self.proj(mixed), self.drop, noise, 2 * self.layer + 1))
        return self.norm2(x + dropout(self.down(F.gelu(self.up(x))), self.drop, noise, 2 * self.layer + 2))


class Bert(Reference):
    """Masked language model. Input [B, T] token ids, output [B, T, vocab] logits."""

    partita_loss = "masked"

    def __init__(
        self, *, vocab: int, layers: int, width: int, heads: int, ffn: int, context: int, drop: float, std: float
    ) -> None:
        super().__init__(layers, width, std)
        self.drop, self.context = drop, context
        self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.blocks = nn.ModuleList(BertBlock(width, heads, ffn, drop, i) for i in range(layers))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=EPS)
        self.head = nn.Linear(width, vocab)
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
        x = dropout(self.norm(self.embed(input_ids) + self.positions(positions)), self.drop, noise, 0)
        for block in self.blocks:
            x = block(x, documents, noise)
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


def make_bert(config: Any, vocab: int) -> Bert:
    """Builder of the slot `model`. Raises ConfigError for sizes that don't fit; the head is always tied, as in the paper."""
    check_sizes(config)
    m = config.model
    return Bert(
        vocab=vocab, layers=m.layers, width=m.width, heads=m.heads, ffn=m.ffn or 4 * m.width, context=m.context or config.data.sequence,
        drop=m.dropout, std=m.init_std,
    )  # fmt: skip
