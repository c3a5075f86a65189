"""Text from a trained causal model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module, tokenizer: Any, prompt: str, tokens: int, seed: int, temperature: float = 0.8, top_k: int = 50
) -> str:
    """`prompt` and at most `tokens` more tokens, drawn from the `top_k` likeliest (Fan et al. 2018); ends at the tokenizer's `eos`."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = [int(i) for i in tokenizer.encode(prompt)] or [0]
    context = getattr(model, "context", None) or len(ids) + tokens
    was_training = model.training
    model.eval()
    try:
        for _ in range(tokens):
            logits = model(torch.tensor([ids[-context:]], device=device))[0, -1].float().cpu() / temperature
            values, candidates = logits.topk(min(top_k, logits.numel()))
            chosen = int(candidates[torch.multinomial(values.softmax(0), 1, generator=generator)])
            if tokenizer.eos is not None and chosen == tokenizer.eos:
                break
            ids.append(chosen)
    finally:
        model.train(was_training)
    return tokenizer.decode(ids)
