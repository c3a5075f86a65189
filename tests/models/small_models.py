"""Small models and their config."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from partita.config.schema import DataConfig, ModelConfig
from partita.models.bert import make_bert
from partita.models.gpt import make_gpt
from partita.models.hf import make_hf
from partita.models.init import initialize
from partita.models.llama import make_llama

VOCAB = 61
BUILDERS: dict[str, Callable[..., Any]] = {"gpt": make_gpt, "llama": make_llama, "bert": make_bert, "hf": make_hf}


def make_config(name: str, *, sequence: int = 16, pack: bool = False, **model: Any) -> Any:
    """The nodes that builders read; a model of 2 layers, width 32, 4 heads."""
    node = ModelConfig(**{"name": name, "layers": 2, "width": 32, "heads": 4, **model})
    return SimpleNamespace(model=node, data=DataConfig(sequence=sequence, pack=pack), seed=3)


def build(name: str, vocab: int = VOCAB, **options: Any) -> Any:
    """A model with initial weights, in evaluation mode."""
    with torch.device("meta"):
        model = BUILDERS[name](make_config(name, **options), vocab)
    return initialize(model, 3).eval()


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Larger random weights, biases and norms too: what a permuted or forgotten weight would change must show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model
