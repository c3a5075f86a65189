"""Parts of the reference models. Plain torch; nothing here knows of ranks.

Layers don't initialise themselves: `init_parameter` writes their weights, and drawing them twice would double the time to start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.errors import PartitaError
from partita.models.sizes import Sizes


class Linear(nn.Linear):
    """nn.Linear with memory that nobody has written yet."""

    def reset_parameters(self) -> None:
        """Left to `init_parameter`."""


class Embedding(nn.Embedding):
    """nn.Embedding with memory that nobody has written yet."""

    def reset_parameters(self) -> None:
        """Left to `init_parameter`."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """Softmax attention: q [B, H, T, D], k and v [B, H or fewer, T, D] -> [B, H, T, D].

    mask: bool [B, 1, T, T], true where a token sees another, causality included; None: all, or with `causal` those before it.
    """
    if k.shape[1] != q.shape[1]:
        # Repeated here and not by enable_gqa, which keeps some devices from their fused kernels.
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)


def document_mask(documents: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """Bool [B, 1, T, T] that keeps documents [B, T] (a number for each token) apart; None without documents."""
    if documents is None:
        return None
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return (same.tril() if causal else same).unsqueeze(1)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, bool], torch.Tensor]
MakeMask = Callable[[torch.Tensor | None, bool], Any]


class Attention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.head, self.causal = width // heads, causal
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.attend: Attend = attend

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x [B, T, C] -> [B, T, C]."""
        # heads and tokens are counted in what the matrix gives: a rank may hold a share of either
        q, k, v = (p.unflatten(2, (-1, self.head)).transpose(1, 2) for p in self.qkv(x).chunk(3, dim=2))
        return self.out(self.attend(q, k, v, mask, self.causal).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with a GELU: exact, or its tanh form (Hendrycks and Gimpel 2016)."""

    def __init__(self, width: int, inner: int, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.up = Linear(width, inner)
        self.down = Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C] -> [..., C]."""
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class ReferenceModel(nn.Module, ABC):
    """What the reference models share. Subclasses own `blocks`, a ModuleList, and set `partita_loss`.

    mask: makes what the blocks' attention is given of documents. It and the `attend` of each attention are replaced together where
    attention sees more tokens than this rank holds.
    """

    partita_loss: str
    partita_sequence_parallel = True  # nothing here takes the length of activations for that of the sequence
    blocks: nn.ModuleList

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.context = sizes.context
        self.mask: MakeMask = document_mask

    def partita_units(self) -> list[tuple[str, nn.Module]]:
        """The blocks, in the order in which forward calls them."""
        return [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]

    def flops_per_token(self, sequence: int) -> float:
        """Of forward and backward: 6 for each weight of a matrix product, 12 x layers x width x sequence for attention
        (Chowdhery et al. 2022, appendix B: PaLM; the causal half is not taken off)."""
        s = self.sizes
        return 6.0 * self.matrix_weights() + 12.0 * s.layers * s.width * sequence

    @abstractmethod
    def partita_tensor_plan(self) -> dict[str, str]:
        """Patterns of module paths -> tensor parallel styles (partita.plan.styles)."""

    @abstractmethod
    def matrix_weights(self) -> int:
        """Weights of all matrix products, from sizes alone: the modules may hold a share of them only."""

    def places(self, input_ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Positions of the tokens, int64 [B, T] or [T]. Raises PartitaError where the sequence is longer than the context."""
        length = input_ids.shape[1]
        if length > self.context:
            raise PartitaError(f"a sequence has {length} tokens and the model {self.context} positions. Raise model.context.")
        return torch.arange(length, device=input_ids.device) if positions is None else positions


def tie(head: Any, embedding: Any) -> None:
    """Let an output layer share the embedding's weight."""
    head.weight = embedding.weight
