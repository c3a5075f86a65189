"""GPT-2 (Radford et al. 2019): pre-norm blocks, learned positions.

Exported weights give equal logits in transformers' GPT2LMHeadModel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from partita.models.common import Attention, Embedding, Linear, Mlp, ReferenceModel, tie
from partita.models.init import draw
from partita.models.layers import LayerNorm
from partita.models.noise import Noise, dropout
from partita.models.sizes import Sizes, read_sizes


class Block(nn.Module):
    """Attention and feed-forward, each added to the stream. index: of the block, tells its dropout places apart."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        self.dropout, self.index = sizes.dropout, index
        self.norm1 = LayerNorm(sizes.width)
        self.attention = Attention(sizes.width, sizes.heads, causal=True)
        self.norm2 = LayerNorm(sizes.width)
        self.mlp = Mlp(sizes.width, sizes.ffn, approximate="tanh")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, noise: Noise | None = None) -> torch.Tensor:
        """x [B, T, C] -> [B, T, C]; mask as in `common.attend`."""
        x = x + dropout(self.attention(self.norm1(x), mask), self.dropout, noise, 2 * self.index + 1)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, noise, 2 * self.index + 2)


class GPT(ReferenceModel):
    """A causal language model."""

    partita_loss = "causal"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.tokens = Embedding(sizes.vocab, sizes.width)
        self.positions = Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, i) for i in range(sizes.layers))
        self.norm = LayerNorm(sizes.width)
        self.head = Linear(sizes.width, sizes.vocab, bias=False)
        if sizes.tie:
            tie(self.head, self.tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """input_ids, positions, documents: int64 [B, T] -> logits [B, T, vocab]. noise: of dropout; None: no dropout."""
        x = self.tokens(input_ids) + self.positions(self.places(input_ids, positions))
        x = dropout(x, self.sizes.dropout, noise, 0)
        mask = self.mask(documents, True)
        for block in self.blocks:
            x = block(x, mask, noise)
        return self.head(self.norm(x))

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill one whole parameter in place, as GPT-2 does."""
        draw(name, tensor, generator, self.sizes.std, self.sizes.std / math.sqrt(2 * self.sizes.layers))

    def partita_tensor_plan(self) -> dict[str, str]:
        """Heads, inner channels and tokens of the vocabulary are cut; norms and positions are whole."""
        s = self.sizes
        return {
            "tokens": "embedding",
            "positions": "position",
            "blocks.*.attention.qkv": f"packed:{s.width},{s.width},{s.width}/{s.head}",
            "blocks.*.attention.out": f"rowwise/{s.head}",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "head": "head",
        }

    def matrix_weights(self) -> int:
        """Weights of all matrix products."""
        s = self.sizes
        return s.layers * (4 * s.width * s.width + 2 * s.width * s.ffn) + s.width * s.vocab


def make_gpt(config: Any, vocab: int) -> GPT:
    """Builder of the slot `model`. On a real device the matrices hold no values until `init.initialize` or a run fills them."""
    return GPT(read_sizes(config, vocab))
