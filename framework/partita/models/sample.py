"""Text from a trained model: a causal one goes on with a prompt, a masked one fills what is masked after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partita.errors import PartitaError

ROUNDS = 16  # forward passes in which a masked model fills all masks


@dataclass(frozen=True)
class Choice:
    """How a token is drawn from logits [V]: among the `top_k` likeliest (Fan et al. 2018), never one that isn't `allowed` [V]."""

    allowed: torch.Tensor
    temperature: float
    top_k: int
    generator: torch.Generator

    def draw(self, logits: torch.Tensor) -> tuple[int, float]:
        """An id and its probability among those it was drawn from. Temperature 0: the likeliest id."""
        scores = logits.float().cpu().masked_fill(~self.allowed, -torch.inf)
        values, ids = scores.topk(min(self.top_k, int(self.allowed.sum())))
        if self.temperature == 0.0:
            return int(ids[0]), float(values.softmax(0)[0])
        p = (values / self.temperature).softmax(0)
        i = int(torch.multinomial(p, 1, generator=self.generator))
        return int(ids[i]), float(p[i])


class Agreed(nn.Module):
    """A model whose logits are those of rank 0 on all ranks, which call it together: so all draw the same tokens, and stop together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.partita_loss = getattr(model, "partita_loss", "causal")
        self.context = getattr(model, "context", None)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64 [B, T] -> logits [B, T, vocab]."""
        logits: torch.Tensor = self.model(input_ids).contiguous()
        dist.broadcast(logits, 0)
        return logits


@torch.no_grad()
def generate(
    model: nn.Module, tokenizer: Any, prompt: str, tokens: int, seed: int, temperature: float = 0.8, top_k: int = 50
) -> str:
    """The prompt and `tokens` more, as text; fewer where the end token is drawn, or a masked model's context ends.

    The same model, prompt and seed give the same text. Beyond its context a causal model sees the last tokens only.
    """
    device = next(model.parameters()).device
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eos if tokenizer.eos is not None else 0]
    generator = torch.Generator().manual_seed(seed)
    with _evaluating(model):
        vocab = int(model(torch.tensor([ids[:1]], device=device)).shape[-1])
        masked = getattr(model, "partita_loss", "causal") == "masked"
        choice = Choice(_allowed(tokenizer, vocab, end=not masked), temperature, top_k, generator)
        fill = _fill_masks if masked else _continue
        return str(tokenizer.decode(fill(model, tokenizer, ids, tokens, choice, device)))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _allowed(tokenizer: Any, vocab: int, *, end: bool) -> torch.Tensor:
    """Bool [vocab]: ids that stand for text; the end token as well, where text may end."""
    allowed = torch.arange(vocab) < tokenizer.vocab_size
    for special in tokenizer.special:
        if special < vocab and not (end and special == tokenizer.eos):
            allowed[special] = False
    return allowed


def _context(model: nn.Module, default: int) -> int:
    return getattr(model, "context", None) or default


def _continue(model: nn.Module, tokenizer: Any, ids: list[int], tokens: int, choice: Choice, device: torch.device) -> list[int]:
    context = _context(model, len(ids) + tokens)
    for _ in range(tokens):
        logits = model(torch.tensor([ids[-context:]], device=device))
        chosen, _ = choice.draw(logits[0, -1])
        if chosen == tokenizer.eos:
            break
        ids = [*ids, chosen]
    return ids


def _fill_masks(model: nn.Module, tokenizer: Any, ids: list[int], tokens: int, choice: Choice, device: torch.device) -> list[int]:
    """Masks after the prompt, filled in rounds, the surest first (Ghazvininejad et al. 2019 keep the surest likewise)."""
    if tokenizer.mask is None:
        raise PartitaError("a masked language model needs a tokenizer with a mask token to give a sample. Set train.sample=0.")
    context = _context(model, len(ids) + tokens)
    ids = ids[: max(context - tokens, context // 2)]
    row = ids + [tokenizer.mask] * min(tokens, context - len(ids))
    open_places = [i for i, token in enumerate(row) if token == tokenizer.mask]
    for left in range(ROUNDS, 0, -1):
        if not open_places:
            break
        logits = model(torch.tensor([row], device=device))[0]
        drawn = {i: choice.draw(logits[i]) for i in open_places}
        surest = sorted(open_places, key=lambda i: -drawn[i][1])[: -(-len(open_places) // left)]
        for i in surest:
            row[i] = drawn[i][0]
        open_places = [i for i in open_places if i not in surest]
    return row
