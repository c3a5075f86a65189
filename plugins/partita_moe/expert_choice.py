"""Experts choose their tokens (Zhou et al. 2022, Mixture-of-Experts with Expert Choice Routing, section 3.2): loads are even by construction.

Each expert takes its best tokens of every sequence, by their scores: softmax over experts, which are the gates too. A token may be taken
by several experts, or by none. Tokens compete within one sequence only, so neither ranks nor micro-batches change who is taken.
"""

from __future__ import annotations

import torch

from partita_kernels import Order
from partita_moe.routing import Choice, Routing

Tensor = torch.Tensor


def room(tokens: int, routing: Routing) -> int:
    """Tokens of one sequence that an expert takes: top_k * tokens / E, rounded up, at most all."""
    return min(tokens, -(-routing.top_k * tokens // routing.experts))


def taken(logits: Tensor, routing: Routing, sequences: int) -> tuple[Choice, Order]:
    """logits [B * T, E] of B `sequences`, float32 or wider -> the choice, with a column for each expert (k = E), and its order.

    `Choice.experts` is -1 where an expert did not take the token. Of tokens with equal scores the first is taken. As all sizes are known,
    nothing waits for a device.
    """
    experts, device = routing.experts, logits.device
    tokens = len(logits) // max(1, sequences)
    many = room(tokens, routing)
    scores = logits.softmax(-1)
    ranked = scores.detach().view(sequences, tokens, experts).argsort(dim=1, descending=True, stable=True)
    best = ranked[:, :many].sort(dim=1).values  # by position again, as rows of an expert lie
    first = torch.arange(sequences, device=device).view(-1, 1, 1) * tokens
    rows = (best + first).permute(2, 0, 1).reshape(experts, -1)
    which = torch.arange(experts, device=device)
    slots = (rows * experts + which.unsqueeze(1)).reshape(-1)
    places = torch.full((len(logits) * experts,), -1, device=device)
    places = places.scatter_(0, slots, torch.arange(len(slots), device=device)).view(-1, experts)
    sizes = torch.full((experts,), rows.shape[1], device=device)
    return Choice(which.where(places >= 0, -1), scores, scores), Order(slots, places, sizes)
