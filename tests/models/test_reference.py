"""GPT, Llama and BERT: sizes, initial weights, packing, gradients, config mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_models import BUILDERS, VOCAB, build, make_config, spread
from torch import nn

from partita.errors import ConfigError, PartitaError
from partita.models.init import initialize
from partita.plan.activations import trace_activations
from partita.plan.model_spec import inspect_model
from partita.runtime.rng import name_generator
from partita.state.units import find_units
from partita.train.loss import token_cross_entropy

REFERENCE = ("gpt", "llama", "bert")


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tie", [True, False])
def test_parameter_counts(tie: bool) -> None:
    v, d, t, n = VOCAB, 32, 16, 2
    head = 0 if tie else v * d
    block = 12 * d * d + 13 * d
    assert count(build("gpt", tie_embeddings=tie)) == v * d + t * d + n * block + 2 * d + head
    ffn = 128  # 8/3 of 32, rounded up to 64
    llama = n * (d * d + 2 * d * 16 + d * d + 3 * d * ffn + 2 * d) + v * d + d + head
    assert count(build("llama", tie_embeddings=tie, kv_heads=2)) == llama
    bert = v * d + t * d + 2 * d + n * block + d * d + d + 2 * d + v + head
    assert count(build("bert", tie_embeddings=tie)) == bert


@pytest.mark.parametrize("name", REFERENCE)
def test_weights_depend_on_name_and_seed_only(name: str) -> None:
    on_cpu = initialize(BUILDERS[name](make_config(name), VOCAB), 3)
    from_meta = build(name)
    for (n, a), (m, b) in zip(on_cpu.named_parameters(), from_meta.named_parameters(), strict=True):
        assert n == m
        assert torch.equal(a, b)
    alone = torch.empty(128 if name != "llama" else 256, 32)
    inner = "blocks.1.mlp.gate_up.weight" if name == "llama" else "blocks.1.mlp.up.weight"
    from_meta.init_parameter(inner, alone, name_generator(3, inner))
    assert torch.equal(alone, from_meta.get_parameter(inner))
    other = initialize(BUILDERS[name](make_config(name), VOCAB), 4)
    assert not torch.equal(other.tokens.weight, from_meta.tokens.weight)


def test_initial_distribution() -> None:
    model = build("gpt", width=256, layers=2, init_std=0.05)
    block = model.blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.05 / math.sqrt(4), rel=0.02)
    assert block.attention.out.weight.std().item() == pytest.approx(0.05 / math.sqrt(4), rel=0.02)
    assert not block.attention.qkv.bias.any()
    assert (block.norm1.weight == 1).all()
    assert not torch.equal(model.blocks[0].mlp.up.weight, model.blocks[1].mlp.up.weight)
    assert build("bert", width=256).blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("name", REFERENCE)
def test_tied_head_is_one_parameter_after_meta(name: str) -> None:
    tied, untied = build(name), build(name, tie_embeddings=False)
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight


@pytest.mark.parametrize("name", REFERENCE)
def test_first_loss_is_that_of_guessing(name: str, ids: torch.Tensor) -> None:
    model = build(name)
    total, counted = token_cross_entropy(model(ids), ids.roll(-1, 1))  # a tied head likes the token it was given
    assert (total / counted).item() == pytest.approx(math.log(VOCAB), rel=0.05)


@pytest.mark.parametrize("name", REFERENCE)
def test_gradients_are_finite_and_reach_every_parameter(name: str, ids: torch.Tensor) -> None:
    model = build(name).train()
    total, counted = token_cross_entropy(model(ids), ids.roll(-1, 1))
    (total / counted).backward()
    for n, p in model.named_parameters():
        assert p.grad is not None, n
        assert p.grad.isfinite().all(), n
        assert p.grad.any(), n


@pytest.mark.parametrize("name", REFERENCE)
def test_no_grad_forward_is_the_same(name: str, ids: torch.Tensor) -> None:
    model = build(name)
    with torch.no_grad():
        quiet = model(ids)
    assert not quiet.requires_grad
    assert torch.equal(quiet, model(ids).detach())


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_causal_models_do_not_look_ahead(name: str, ids: torch.Tensor) -> None:
    model = spread(build(name))
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCAB
    a, b = model(ids), model(changed)
    assert torch.allclose(a[:, :9], b[:, :9], atol=1e-6)
    assert not torch.allclose(a[:, 9:], b[:, 9:], atol=1e-3)


@pytest.mark.parametrize("name", REFERENCE)
def test_packed_documents_are_separate_documents(name: str, ids: torch.Tensor) -> None:
    model = spread(build(name, kv_heads=2) if name == "llama" else build(name))
    lengths = (5, 8, 3)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(3, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1)
    packed = model(ids, positions=positions, documents=documents)
    apart = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
    assert torch.allclose(packed, apart, atol=2e-5)
    assert not torch.allclose(model(ids), apart, atol=1e-2)


@pytest.mark.parametrize("name", REFERENCE)
def test_one_document_is_no_mask(name: str, ids: torch.Tensor) -> None:
    model = spread(build(name))
    assert torch.allclose(model(ids, documents=torch.zeros_like(ids)), model(ids), atol=2e-5)


def test_llama_sees_distances_not_places(ids: torch.Tensor) -> None:
    model = spread(build("llama"))
    positions = torch.arange(16).expand(3, -1)
    assert torch.allclose(model(ids, positions=positions + 40), model(ids), atol=1e-4)


def test_shared_key_heads_are_repeated_heads(ids: torch.Tensor) -> None:
    grouped, full = spread(build("llama", kv_heads=2)), build("llama")
    weights = grouped.state_dict()
    for i in range(2):
        q, k, v = weights[f"blocks.{i}.attention.qkv.weight"].split((32, 16, 16))
        k, v = (w.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32) for w in (k, v))
        weights[f"blocks.{i}.attention.qkv.weight"] = torch.cat((q, k, v))
    full.load_state_dict(weights)
    assert torch.allclose(grouped(ids), full(ids), atol=1e-5)


@pytest.mark.parametrize("name", REFERENCE)
def test_bf16_stays_bf16(name: str, ids: torch.Tensor) -> None:
    model = build(name)
    exact = model(ids)
    half = model.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), exact, atol=3e-2)


@pytest.mark.parametrize("name", REFERENCE)
def test_what_the_plan_reads(name: str) -> None:
    with torch.device("meta"):
        model = BUILDERS[name](make_config(name), VOCAB)
    assert [n for n, _ in find_units(model)] == ["blocks.0", "blocks.1"]
    spec = inspect_model(model)
    assert spec.matching_modules(("*attention*",)) == ["blocks.0.attention", "blocks.1.attention"]
    assert not spec.buffers
    traced = trace_activations(model, spec.blocks, spec.root, (2, 16), torch.float32)
    assert not traced.reason
    assert traced.output_numel == 2 * 16 * VOCAB
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert model.matrix_weights() == linear
    assert spec.flops_per_token(16) == 6 * linear + 12 * 2 * 32 * 16


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt", {"heads": 5}, "model.heads: 5 doesn't divide model.width=32\n    -> e.g. model.heads=4"),
        ("gpt", {"layers": 0}, "model.layers: 0"),
        ("gpt", {"dropout": 1.0}, "model.dropout"),
        ("gpt", {"context": 8}, "data.sequence=16"),
        ("gpt", {"kv_heads": 2}, "model=llama"),
        ("bert", {"rope_base": 5e5}, "model=llama"),
        ("gpt", {"path": "/somewhere"}, "model=hf"),
        ("gpt", {"options": {"widht": 3}}, "did you mean 'width'"),
        ("llama", {"kv_heads": 3}, "model.kv_heads: 3 doesn't divide model.heads=4"),
        ("llama", {"width": 36}, "an even number"),
    ],
)
def test_sizes_that_do_not_fit(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BUILDERS[name](make_config(name, **options), VOCAB)
    assert words in str(caught.value)


def test_all_size_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        BUILDERS["gpt"](make_config("gpt", layers=0, dropout=2.0, context=1), VOCAB)
    assert all(key in str(caught.value) for key in ("model.layers", "model.dropout", "model.context"))


def test_a_sequence_beyond_the_context_is_named() -> None:
    with pytest.raises(PartitaError, match=r"17 tokens and the model 16 positions. Raise model.context"):
        build("gpt")(torch.zeros(1, 17, dtype=torch.int64))
