"""Who is sent where: scores, choice, gates and the losses that keep loads even. In float32 or wider, whatever the model computes in.

T tokens, E experts, k choices of each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita_kernels import route

Tensor = torch.Tensor
SOFTMAX_ALL, SOFTMAX_CHOSEN, SIGMOID, SIGMOID_ALL = "softmax_all", "softmax_chosen", "sigmoid", "sigmoid_all"
EXPERT_CHOICE = "expert_choice"
POSITION, PROBABILITY = "position", "probability"


@dataclass(frozen=True)
class Routing:
    """How tokens are routed. gate: softmax_all (probability among all experts: Switch), softmax_chosen (among the chosen: GShard,
    Mixtral), sigmoid (of its own logit, over the sum of the chosen: DeepSeek-V3), sigmoid_all (as it is), expert_choice (probability among all experts, and
    experts choose: Zhou et al. 2022; a token has `top_k` of them on average). See `MoeConfig` for the rest."""

    experts: int
    top_k: int
    gate: str
    groups: int = 1
    group_top_k: int = 1
    scale: float = 1.0
    balance: str = "sequence"
    aux_weight: float = 1e-2
    z_weight: float = 0.0
    bias_rate: float = 1e-3
    capacity: float | None = None
    drop: str = POSITION
    jitter: float = 0.0
    shared: int = 0
    residual: bool = False


@dataclass(frozen=True)
class Choice:
    """experts int64 [T, k], best first; gates [T, k]; probabilities [T, E], each row summing to one; floats are as wide as the logits."""

    experts: Tensor
    gates: Tensor
    probabilities: Tensor


def wide(x: Tensor) -> Tensor:
    """x as float32, or as it is where that is wider."""
    return x if x.dtype == torch.float64 else x.float()


def choose(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Choice:
    """Route tokens by logits [T, E], float32 or wider. bias [E]: added for the choice only, never in the gates (Wang et al. 2024)."""
    gate = SIGMOID if routing.gate == SIGMOID_ALL else routing.gate
    groups = {"groups": routing.groups, "kept_groups": routing.group_top_k if routing.groups > 1 else 1}
    experts, gates, probabilities = route(logits, routing.top_k, gate, bias=bias, scale=routing.scale, **groups)
    if routing.gate == SIGMOID_ALL:
        gates = logits.gather(-1, experts).sigmoid() * routing.scale
    return Choice(experts, gates, probabilities)


def balance_loss(choice: Choice, routing: Routing, sequences: int, share: Tensor | None = None) -> Tensor:
    """E * sum_i f_i P_i, 0-d: 1 where loads are even, E where one expert has all (Fedus et al. 2022, equation 4).

    f_i: share of choices that fall on expert i; P_i: its mean probability. By `sequence` it is taken over each of the `sequences` equal parts of the tokens
    and averaged, so it does not depend on how sequences are dealt to ranks and micro-batches; by `batch` over all tokens that are here. share: f
    where it isn't counted here: [parts, E] of sequences that other ranks have parts of, or by `global` [E] of all tokens of the update before
    (Qiu et al. 2025, section 3, with counts that need no wait). As f has no gradient, the sum over ranks, by their tokens, is then that of whole sequences.
    """
    parts = sequences if routing.balance == "sequence" else 1
    mean = choice.probabilities.view(parts, -1, routing.experts).mean(1)
    if share is None:
        share = chosen(choice, routing, parts).mean(1) / routing.top_k
    return routing.experts * (share * mean).sum(-1).mean()


def chosen(choice: Choice, routing: Routing, parts: int) -> Tensor:
    """[parts, T / parts, E]: 1 where a token has chosen an expert, else 0; without a gradient."""
    taken = torch.zeros_like(choice.probabilities)
    return taken.scatter_add_(1, choice.experts, torch.ones_like(choice.gates)).view(parts, -1, routing.experts)


def z_loss(logits: Tensor) -> Tensor:
    """Mean squared log-sum-exp of the logits, 0-d (Zoph et al. 2022, equation 5)."""
    return logits.logsumexp(-1).square().mean()


def within_capacity(choice: Choice, routing: Routing) -> Tensor:
    """Bool [T, k]: which choices an expert has room for, ceil(capacity * k * T / E) each.

    Places are given to first choices first, then by position; or, by `probability`, to the largest gates first, of equal ones in that order.
    """
    assert routing.capacity is not None
    tokens, k = choice.experts.shape
    room = max(1, -int(-routing.capacity * k * tokens // routing.experts))
    queue = choice.experts.t().reshape(-1)  # all first choices, then all second ones
    ranked = choice.gates.detach().t().reshape(-1).argsort(descending=True, stable=True) if routing.drop == PROBABILITY else None
    queue = queue if ranked is None else queue[ranked]
    place = torch.nn.functional.one_hot(queue, routing.experts).cumsum(0).gather(1, queue.unsqueeze(1)).squeeze(1)
    kept = place <= room
    kept = kept if ranked is None else torch.empty_like(kept).scatter_(0, ranked, kept)
    return kept.view(k, tokens).t()


def evened(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias after an update: `rate` up for experts with less than the mean load, down for others (Wang et al. 2024, algorithm 1)."""
    mean = counts.mean(-1, keepdim=True)
    return bias + rate * (mean - counts).sign()


def worst_violation(counts: Tensor) -> float:
    """MaxVio: how far the fullest expert is above the mean load, as a share of it (Wang et al. 2024, equation 4)."""
    mean = counts.mean(-1)
    return float(((counts.amax(-1) - mean) / mean.clamp(min=1.0)).max())
