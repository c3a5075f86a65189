"""Text from models: the same for the same seed, inside context and vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import build, spread
from torch import nn

from partita.data.tokenizer import BytesTokenizer
from partita.models.sample import generate

TOKENIZER = BytesTokenizer()


class Successor(nn.Module):
    """Predicts byte + 1; after `z` the end token."""

    context = 4

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(ids.shape[1])
        after = torch.where(ids == ord("z"), 256, ids + 1)
        return nn.functional.one_hot(after, 300).float() * self.scale


def test_goes_on_within_the_context_until_the_end_token() -> None:
    model = Successor().train()
    assert generate(model, TOKENIZER, "tu", 20, seed=0) == "tuvwxyz"
    assert max(model.seen) == 4
    assert model.training
    assert generate(model, TOKENIZER, "ab", 3, seed=0, temperature=0.0) == "abcde"


@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_same_seed_same_text(name: str) -> None:
    model = spread(build(name, vocab=300, context=32))
    texts = [generate(model, TOKENIZER, "def ", 20, seed, temperature=2.0) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def ")


def test_only_ids_of_the_tokenizer_are_drawn() -> None:
    class Lover(Successor):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.arange(300.0).expand(*ids.shape, 300) * self.scale

    drawn: list[Any] = []

    class Recorder(BytesTokenizer):
        def decode(self, ids: Any) -> str:
            drawn.extend(ids)
            return super().decode(ids)

    generate(Lover(), Recorder(), "a", 5, seed=0, temperature=0.0)
    assert drawn == [97]  # the end token is the largest that may be drawn


def test_a_masked_model_fills_all_masks() -> None:
    model = spread(build("bert", vocab=260, context=32))
    kept: list[int] = []

    class Recorder(BytesTokenizer):
        def decode(self, ids: Any) -> str:
            kept[:] = ids
            return super().decode(ids)

    generate(model, Recorder(), "import os", 160, seed=0)
    assert len(kept) == 32
    assert bytes(kept[:9]) == b"import os"
    assert max(kept) < 256


def test_an_empty_prompt() -> None:
    assert isinstance(generate(build("gpt", vocab=260), TOKENIZER, "", 4, seed=0), str)
