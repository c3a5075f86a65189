"""BERT (Devlin et al. 2018) for masked tokens: norms after the sums, learned positions, one token type.

Exported weights give equal logits in transformers' BertForMaskedLM (whose token type 0 becomes a row of zeros).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.common import Attention, Embedding, Linear, Mlp, ReferenceModel, tie
from partita.models.init import draw
from partita.models.layers import LayerNorm
from partita.models.noise import Noise, dropout
from partita.models.sizes import Sizes, read_sizes

EPS = 1e-12  # of the published model


class BertBlock(nn.Module):
    """Attention and feed-forward, each added to its input and normed. index: of the block, tells its dropout places apart."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        self.dropout, self.index = sizes.dropout, index
        self.attention = Attention(sizes.width, sizes.heads, causal=False)
        self.norm1 = LayerNorm(sizes.width, eps=EPS)
        self.mlp = Mlp(sizes.width, sizes.ffn, approximate="none")
        self.norm2 = LayerNorm(sizes.width, eps=EPS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, noise: Noise | None = None) -> torch.Tensor:
        """x [B, T, C] -> [B, T, C]; mask as in `common.attend`."""
        x = self.norm1(x + dropout(self.attention(x, mask), self.dropout, noise, 2 * self.index + 1))
        return self.norm2(x + dropout(self.mlp(x), self.dropout, noise, 2 * self.index + 2))


class Transform(nn.Module):
    """What stands between the last block and the output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = Linear(width, width)
        self.norm = LayerNorm(width, eps=EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C] -> [..., C]."""
        return self.norm(F.gelu(self.dense(x)))


class Bert(ReferenceModel):
    """A masked language model. The output layer has a bias of its own, tied or not."""

    partita_loss = "masked"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.tokens = Embedding(sizes.vocab, sizes.width)
        self.positions = Embedding(sizes.context, sizes.width)
        self.norm = LayerNorm(sizes.width, eps=EPS)
        self.blocks = nn.ModuleList(BertBlock(sizes, i) for i in range(sizes.layers))
        self.transform = Transform(sizes.width)
        self.head = Linear(sizes.width, sizes.vocab)
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
        x = self.norm(self.tokens(input_ids) + self.positions(self.places(input_ids, positions)))
        x = dropout(x, self.sizes.dropout, noise, 0)
        mask = self.mask(documents, False)
        for block in self.blocks:
            x = block(x, mask, noise)
        return self.head(self.transform(x))

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill one whole parameter in place; the norms after the sums make scaled branches needless."""
        draw(name, tensor, generator, self.sizes.std)

    def partita_tensor_plan(self) -> dict[str, str]:
        """Heads, inner channels and tokens of the vocabulary are cut; norms, the transform and positions are whole."""
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
        return s.layers * (4 * s.width * s.width + 2 * s.width * s.ffn) + s.width * (s.width + s.vocab)


def make_bert(config: Any, vocab: int) -> Bert:
    """Builder of the slot `model`. On a real device the matrices hold no values until `init.initialize` or a run fills them."""
    return Bert(read_sizes(config, vocab))
