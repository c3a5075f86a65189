"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped heads, SwiGLU.

Exported weights give equal logits in transformers' LlamaForCausalLM.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from partita.models.common import Attend, Embedding, Linear, ReferenceModel, attend, tie
from partita.models.init import draw
from partita.models.layers import RMSNorm, rotate, swiglu
from partita.models.noise import Noise, dropout
from partita.models.sizes import Sizes, read_sizes

EPS = 1e-5  # of Llama 2 and later
Turn = tuple[torch.Tensor, torch.Tensor]


def rotary(positions: torch.Tensor, channels: int, base: float, dtype: torch.dtype) -> Turn:
    """Cosines and sines [B or 1, 1, T, channels / 2] of positions [B, T] or [T] (Su et al. 2021), computed in float32."""
    rates = base ** (-torch.arange(0, channels, 2, dtype=torch.float32, device=positions.device) / channels)
    angles = positions.to(torch.float32).unsqueeze(-1) * rates
    angles = angles.unsqueeze(-3) if angles.ndim == 3 else angles[None, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class LlamaAttention(nn.Module):
    """Causal attention in which groups of query heads share a head of keys and values (Ainslie et al. 2023)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head, self.shares = sizes.head, sizes.heads // sizes.kv_heads  # query heads that share keys and values
        self.attend: Attend = attend
        self.qkv = Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * sizes.head, bias=False)
        self.out = Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, turn: Turn, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x [B, T, C] -> [B, T, C]."""
        joined = self.qkv(x).unflatten(2, (-1, self.head)).transpose(1, 2)
        # heads are counted in what the matrix gives: a rank may hold a share of them
        kv = max(1, joined.shape[1] // (self.shares + 2))
        q, k, v = joined.split((joined.shape[1] - 2 * kv, kv, kv), dim=1)
        y = self.attend(rotate(q, turn), rotate(k, turn), v, mask, True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    """Feed-forward with a gate (Shazeer 2020): down(silu(gate) * up)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * inner, bias=False)
        self.down = Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C] -> [..., C]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(swiglu(gate, up))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each added to the stream. index: of the block, tells its dropout places apart."""

    def __init__(self, sizes: Sizes, index: int) -> None:
        super().__init__()
        self.dropout, self.index = sizes.dropout, index
        self.norm1 = RMSNorm(sizes.width, eps=EPS)
        self.attention = LlamaAttention(sizes)
        self.norm2 = RMSNorm(sizes.width, eps=EPS)
        self.mlp = SwiGlu(sizes.width, sizes.ffn)

    def forward(self, x: torch.Tensor, turn: Turn, mask: torch.Tensor | None = None, noise: Noise | None = None) -> torch.Tensor:
        """x [B, T, C] -> [B, T, C]; turn: of `rotary`; mask as in `common.attend`."""
        x = x + dropout(self.attention(self.norm1(x), turn, mask), self.dropout, noise, 2 * self.index + 1)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, noise, 2 * self.index + 2)


class Llama(ReferenceModel):
    """A causal language model."""

    partita_loss = "causal"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.tokens = Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(LlamaBlock(sizes, i) for i in range(sizes.layers))
        self.norm = RMSNorm(sizes.width, eps=EPS)
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
        x = dropout(self.tokens(input_ids), self.sizes.dropout, noise, 0)
        turn = rotary(self.places(input_ids, positions), self.sizes.head, self.sizes.rope_base, x.dtype)
        mask = self.mask(documents, True)
        for block in self.blocks:
            x = block(x, turn, mask, noise)
        return self.head(self.norm(x))

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill one whole parameter in place; branches are scaled as GPT-2 scales them."""
        draw(name, tensor, generator, self.sizes.std, self.sizes.std / math.sqrt(2 * self.sizes.layers))

    def partita_tensor_plan(self) -> dict[str, str]:
        """Heads, inner channels and tokens of the vocabulary are cut; norms are whole."""
        s = self.sizes
        kv = s.kv_heads * s.head
        return {
            "tokens": "embedding",
            "blocks.*.attention.qkv": f"packed:{s.width},{kv},{kv}/{s.head}",
            "blocks.*.attention.out": f"rowwise/{s.head}",
            "blocks.*.mlp.gate_up": f"packed:{s.ffn},{s.ffn}",
            "blocks.*.mlp.down": "rowwise",
            "head": "head",
        }

    def matrix_weights(self) -> int:
        """Weights of all matrix products."""
        s = self.sizes
        attention = 2 * s.width * (s.heads + s.kv_heads) * s.head
        return s.layers * (attention + 3 * s.width * s.ffn) + s.width * s.vocab


def make_llama(config: Any, vocab: int) -> Llama:
    """Builder of the slot `model`. On a real device the matrices hold no values until `init.initialize` or a run fills them."""
    return Llama(read_sizes(config, vocab, rotary=True))
