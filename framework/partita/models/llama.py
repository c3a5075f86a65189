"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU. Exports to transformers' LlamaForCausalLM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.common import Reference, attend, check_sizes
from partita.models.noise import Noise, dropout


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary positions (Su et al. 2021) on x [B, H, T, D], halves paired; positions [T] or [B, T]. Angles are float32."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[..., None] * rates
    angles = angles[None, None] if angles.dim() == 2 else angles[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LlamaBlock(nn.Module):
    """Input and output [B, T, width]."""

    def __init__(self, config: Any, ffn: int, layer: int) -> None:
        super().__init__()
        m = config.model
        self.heads, self.kv_heads, self.base = m.heads, m.kv_heads or m.heads, m.rope_base
        self.drop, self.layer = m.dropout, layer
        size = m.width // m.heads
        self.norm1, self.norm2 = nn.RMSNorm(m.width, eps=1e-6), nn.RMSNorm(m.width, eps=1e-6)
        self.q = nn.Linear(m.width, m.width, bias=False)
        self.k = nn.Linear(m.width, self.kv_heads * size, bias=False)
        self.v = nn.Linear(m.width, self.kv_heads * size, bias=False)
        self.proj = nn.Linear(m.width, m.width, bias=False)
        self.gate, self.up = nn.Linear(m.width, ffn, bias=False), nn.Linear(m.width, ffn, bias=False)
        self.down = nn.Linear(ffn, m.width, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor | None, noise: Noise | None
    ) -> torch.Tensor:
        """positions: [T] or [B, T]; documents: [B, T] or None."""
        b, t, c = x.shape
        h = self.norm1(x)
        q = rotate(self.q(h).view(b, t, self.heads, -1).transpose(1, 2), positions, self.base)
        k = rotate(self.k(h).view(b, t, self.kv_heads, -1).transpose(1, 2), positions, self.base)
        v = self.v(h).view(b, t, self.kv_heads, -1).transpose(1, 2)
        mixed = attend(q, k, v, documents, causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + dropout(self.proj(mixed), self.drop, noise, 2 * self.layer + 1)
        h = self.norm2(x)
        return x + dropout(self.down(F.silu(self.gate(h)) * self.up(h)), self.drop, noise, 2 * self.layer + 2)


class Llama(Reference):
    """Decoder-only language model. Input [B, T] token ids, output [B, T, vocab] logits."""

    residual = ("proj.weight", "down.weight")

    def __init__(self, config: Any, vocab: int) -> None:
        m = config.model
        super().__init__(m.layers, m.width, m.init_std)
        ffn = m.ffn or -(-(m.width * 8 // 3) // 64) * 64
        self.drop = m.dropout
        self.embed = nn.Embedding(vocab, m.width)
        self.blocks = nn.ModuleList(LlamaBlock(config, ffn, i) for i in range(m.layers))
        self.norm = nn.RMSNorm(m.width, eps=1e-6)
        self.head = nn.Linear(m.width, vocab, bias=False)
        if m.tie_embeddings:
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
        x = dropout(self.embed(input_ids), self.drop, noise, 0)
        for block in self.blocks:
            x = block(x, positions, documents, noise)
        return self.head(self.norm(x))


def make_llama(config: Any, vocab: int) -> Llama:
    """Builder of the slot `model`. Raises ConfigError for sizes that don't fit."""
    check_sizes(config)
    return Llama(config, vocab)
