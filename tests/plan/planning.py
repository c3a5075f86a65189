"""Plans of a small model behind a plug-in of its own, from configs made of the schemas alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import field, make_dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.config.schema import CORE_NODES
from partita.models.llama import make_llama
from partita.plan.make import Planned, make_plan
from partita.plugin.markers import hookimpl
from partita.plugin.registry import Registry

BUILT_IN = ("zero", "offload", "parallel", "precision", "recompute", "moe", "compression")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Toy(nn.Module):
    """A GPT with a tied head."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.cut = f"packed:{width},{width},{width}/{width // heads}"

    def partita_tensor_plan(self) -> dict[str, str]:
        """How tensor parallelism cuts it."""
        inner = {"attention.qkv": self.cut, "attention.out": "rowwise", "mlp.0": "colwise", "mlp.2": "rowwise"}
        return {"embedding": "embedding", "head": "head", **{f"blocks.*.{name}": style for name, style in inner.items()}}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Moments:
    """Slot `optimizer`, as far as a plan asks it."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def states(self) -> tuple[str, ...]:
        return self._names


def build_toy(config: Any, vocab: int) -> nn.Module:
    """Slot `model`."""
    m = config.model
    if m.width % m.heads:
        raise ValueError(f"width {m.width} can't be divided by {m.heads} heads")
    return Toy(m.layers, m.width, m.heads, vocab)


@hookimpl
def partita_provide(slot: str, name: str) -> Any:
    """The toy model, one of the reference models, and rules with two states and none."""
    rules = {"adamw": lambda _: Moments("exp_avg", "exp_avg_sq"), "sgd": lambda _: Moments()}
    return {
        ("model", "gpt"): build_toy,
        ("model", "llama"): make_llama,
        **{("optimizer", n): rule for n, rule in rules.items()},
    }.get((slot, name))


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    """The built-in strategies and the toy."""
    toy = ModuleType("partita_toy_for_tests")
    toy.partita_provide, toy.partita_api = partita_provide, 1  # type: ignore[attr-defined]
    sys.modules[toy.__name__] = toy
    entries = [EntryPoint(name, f"partita_{name}", "partita") for name in BUILT_IN]
    yield Registry.load(entry_points=[*entries, EntryPoint("toy", toy.__name__, "partita")])
    sys.modules.pop(toy.__name__, None)


@pytest.fixture
def make_config(registry: Registry) -> Callable[..., Any]:
    """A config from the schemas; keyword `zero__stage=3` sets zero.stage."""

    def make(**overrides: Any) -> Any:
        nodes = {**CORE_NODES, **registry.nodes()}
        root = make_dataclass("Config", [(n, t, field(default_factory=t)) for n, t in nodes.items()] + [("seed", int, 0)])
        config = root()
        for key, value in overrides.items():
            *path, last = key.split("__")
            node = config
            for part in path:
                node = getattr(node, part)
            assert hasattr(node, last), key
            setattr(node, last, value)
        return config

    return make


@pytest.fixture
def plan_of(registry: Registry, make_config: Callable[..., Any]) -> Callable[..., Planned]:
    """The plan of a small config with overrides."""
    small = {"model__width": 64, "model__layers": 4, "model__heads": 4, "data__sequence": 32}

    def plan(**overrides: Any) -> Planned:
        return make_plan(make_config(**{**small, **overrides}), registry)

    return plan
