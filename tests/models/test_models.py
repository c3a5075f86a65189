"""Reference models: same logits as transformers after export, packed documents kept apart, weights by name, dropout by identity."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from partita.config.schema import DataConfig, ModelConfig
from partita.models.bert import make_bert
from partita.models.export import EXPORTERS
from partita.models.gpt import make_gpt
from partita.models.llama import make_llama
from partita.models.noise import Noise, dropout
from partita.runtime.rng import name_generator

BUILDERS = {"gpt": make_gpt, "llama": make_llama, "bert": make_bert}
VOCAB, SEQUENCE = 61, 12


def settings(name: str, **changes: Any) -> SimpleNamespace:
    sizes: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2 if name == "llama" else None, **changes}
    return SimpleNamespace(model=ModelConfig(name=name, **sizes), data=DataConfig(sequence=SEQUENCE))


def build(name: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    model = BUILDERS[name](settings(name, **changes), VOCAB)
    with torch.no_grad():
        for n, p in model.named_parameters():
            model.init_parameter(n, p, name_generator(seed, n))
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=name_generator(seed + 1, n)) * 0.1)  # biases that are 0 would hide mistakes
    return model.eval()


def tokens(batch: int = 3) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, SEQUENCE), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_transformers_gives_the_same_logits(name: str, tie: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(name, tie_embeddings=tie)
    config = settings(name, tie_embeddings=tie)
    plain = {"model": vars(config.model), "data": vars(config.data)}
    described, weights = EXPORTERS[name](plain, {n: p.detach() for n, p in model.named_parameters()})
    (tmp_path / "config.json").write_text(json.dumps(described))
    save_file({k: v.contiguous() for k, v in weights.items()}, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    kind = getattr(transformers, described["architectures"][0])
    theirs, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), theirs.eval()(tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_packed_documents_are_as_if_alone(name: str) -> None:
    model, ids = build(name), tokens(1)
    cut = 5
    documents = torch.tensor([[0] * cut + [1] * (SEQUENCE - cut)])
    positions = torch.tensor([[*range(cut), *range(SEQUENCE - cut)]])
    with torch.no_grad():
        packed = model(ids, positions=positions, documents=documents)
        alone = torch.cat([model(ids[:, :cut]), model(ids[:, cut:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_meta_build_has_the_same_parameters(name: str) -> None:
    with torch.device("meta"):
        meta = BUILDERS[name](settings(name), VOCAB)
    real = build(name)
    assert {n: p.shape for n, p in meta.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert not list(meta.buffers())
    assert len(meta.partita_units()) == 2


def test_weights_depend_on_name_and_seed_only() -> None:
    one, two, other = build("gpt"), build("gpt", layers=4), build("gpt", seed=9)
    assert torch.equal(one.embed.weight, two.embed.weight)
    assert torch.equal(one.blocks[1].up.weight, two.blocks[1].up.weight)
    assert not torch.equal(one.blocks[0].up.weight, one.blocks[1].up.weight)
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_dropout_depends_on_the_identity_of_each_element() -> None:
    x = torch.ones(6, 7, 40)
    whole = dropout(x, 0.25, Noise(1, 2, torch.arange(6)), layer=3)
    parts = torch.cat([dropout(x[i : i + 2], 0.25, Noise(1, 2, torch.arange(i, i + 2)), layer=3) for i in (0, 2, 4)])
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole.unique(), torch.tensor([0.0, 1 / 0.75]))
    for noise, layer in ((Noise(2, 2, torch.arange(6)), 3), (Noise(1, 3, torch.arange(6)), 3), (Noise(1, 2, torch.arange(6)), 4)):
        assert not torch.equal(whole, dropout(x, 0.25, noise, layer))
    kept = dropout(torch.ones(64, 32, 64), 0.25, Noise(0, 0, torch.arange(64)), 0) > 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.005)
    for dim in ((0, 1), (0, 2), (1, 2)):
        assert (kept.float().mean(dim=dim) - 0.75).abs().max() < 0.06
    assert dropout(x, 0.0, None, 0) is x
