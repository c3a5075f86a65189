"""A cut model against the dense one it was made of, in one process each: logits, loss, and the gradient of every parameter."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from partita.config.schema import ModelConfig
from partita.models.hf import make_hf
from partita.models.init import initialize
from partita.plan.plan import Layout
from partita.plan.styles import AXIS
from partita.runtime.mesh import Mesh
from partita.state.units import bind_parameters
from partita.train.loss import token_cross_entropy
from partita_parallel.tensor import cut_model

VOCAB, TOKENS = 53, 12


class Config:
    """As far as a model reads it."""

    def __init__(self, **model: Any) -> None:
        self.seed = 0
        self.model = ModelConfig(name="hf", layers=2, width=32, heads=4, vocab=VOCAB, dropout=0.0, **model)
        self.data = type("Data", (), {"sequence": TOKENS, "pack": False})()


def hf_model(kind: str, **options: Any) -> nn.Module:
    """A dense model with seeded weights; norms and biases are moved away from ones and zeros, which would hide mistakes."""
    sizes = {k: options.pop(k) for k in ("kv_heads", "ffn", "tie_embeddings") if k in options}
    with torch.device("meta"):
        model = make_hf(Config(options={"model_type": kind, **options}, **sizes), VOCAB)
    initialize(model, 0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.05)
    return model


def compare(rank: int, world: int, kind: str, options: dict[str, Any], layout: dict[str, Any]) -> list[str]:
    """What differs between the dense model and the cut one on this rank; empty where nothing does."""
    torch.set_num_threads(1)
    dense = hf_model(kind, **options)
    mesh = Mesh(Layout(tensor=world, **layout), rank, torch.device("cpu"))
    mine = copy.deepcopy(dense)
    shared = cut_model(mine, mesh.layout, mesh.group(AXIS))
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (3, TOKENS), generator=g)
    labels = torch.randint(VOCAB, (3, TOKENS), generator=g).masked_fill(torch.rand(3, TOKENS, generator=g) < 0.2, -100)
    loss, _ = token_cross_entropy(dense(ids), labels)
    loss.backward()
    got, _ = shared.loss(token_cross_entropy)(mine(ids), labels)
    got.backward()
    wrong = _differences("loss", got, loss)
    with shared.wholly(), torch.no_grad():
        wrong += _differences("logits", mine(ids), dense(ids))
    whole = {b.name: b.parameter.grad for b in bind_parameters(dense)}
    for b in bind_parameters(mine):
        grad, expected = b.parameter.grad, whole[b.name]
        if grad is None or expected is None:
            wrong += [] if grad is None and expected is None else [f"{b.name}: a gradient is missing"]
            continue
        if b.part.partial:
            torch.distributed.all_reduce(grad)
        wrong += _differences(b.name, grad, b.part.take(expected))
    return wrong


def _differences(name: str, a: torch.Tensor, b: torch.Tensor) -> list[str]:
    if a.shape != b.shape:
        return [f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}"]
    worst = float((a - b).abs().max())
    return [] if worst <= 2e-5 * max(1.0, float(b.abs().max())) else [f"{name}: off by {worst:.2e}"]
