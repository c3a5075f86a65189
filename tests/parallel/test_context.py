"""Context parallel against one rank: attention by itself, and whole runs with packed documents, dropout and evaluation."""

from __future__ import annotations

from itertools import product
from typing import Any

import against_dense
import pytest
import torch
from attention_runs import attention_parts
from layouts import assert_same, planned, reference, spec_of, train
from packed import packed
from pool import run_ranks

from partita_parallel import blocks

SGD = ("optimizer=sgd", "optimizer.lr=0.05", "train.grad_clip=0")


@pytest.mark.parametrize(
    ("method", "world", "kv_heads"), [("ring", 2, 4), ("ring", 3, 1), ("ring", 4, 2), ("ulysses", 2, 2), ("ulysses", 2, 1)]
)
def test_attention_sees_the_tokens_of_all_ranks(method, world, kv_heads):
    """One document and packed ones, causal and both ways."""
    kinds = list(product((False, True), (False, True)))
    calls = [(method, kv_heads, 12 * world, packs, causal, "float32") for packs, causal in kinds]
    for kind, worst in zip(kinds, zip(*run_ranks(world, packed, attention_parts, calls), strict=True), strict=True):
        assert max(worst) < 2e-6, kind


def test_attention_in_bfloat16():
    calls = [(method, 2, 24, True, True, "bfloat16") for method in ("ring", "ulysses")]
    assert max(max(rank) for rank in run_ranks(2, packed, attention_parts, calls)) < 0.1


@pytest.mark.parametrize("causal", [True, False])
def test_the_fused_and_the_plain_form_agree(causal, monkeypatch):
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 3, 37, 16, generator=g) for _ in range(4))
    monkeypatch.setattr(blocks, "ROWS", 10)
    everything = torch.ones(2, 1, 37, 37, dtype=torch.bool)
    visible = everything.tril() if causal else everything
    fused, plain = blocks.forward(q, k, v, None, causal), blocks.forward(q, k, v, visible, causal)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    for a, b in zip(
        blocks.backward(dout, q, k, v, *fused, None, causal), blocks.backward(dout, q, k, v, *plain, visible, causal), strict=True
    ):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def test_queries_that_see_nothing_in_a_piece_take_nothing_from_it():
    q = k = v = torch.ones(1, 1, 2, 4)
    visible = torch.tensor([[[[True, True], [False, False]]]])
    out, lse = blocks.forward(q, k, v, visible, False)
    assert out[0, 0, 1].abs().sum() == 0 and lse[0, 0, 1] == -torch.inf
    whole, total = blocks.merge(*blocks.forward(q, k, v, None, False), out, lse)
    assert torch.isfinite(whole).all() and torch.isfinite(total).all()


# ------------------------------------------------------------------ whole runs

PACKED = ("data=stdlib", "data.pack=true", "data.limit=30000", "data.sequence=24", "optimizer.lr=0.01")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ((), ("parallel.data=1", "parallel.context=2")),
        (("model=llama", "model.kv_heads=2", *PACKED), ("parallel=context", "parallel.data=1", "parallel.context=4")),
        (("model=llama", "model.kv_heads=2", *PACKED), ("parallel=ulysses", "parallel.data=1")),
        (("model=bert",), ("parallel.data=1", "parallel.context=2")),
        (PACKED, ("parallel=ulysses", "parallel.data=2", "+strategy=zero2", "train.micro_batch=2")),
        (PACKED, ("parallel=context", "parallel.data=2", "+strategy=zero3", "train.micro_batch=2")),
        (PACKED, ("parallel=context", "parallel.data=1", "parallel.tensor=2", "parallel.sequence_parallel=true")),
        (("model=llama", "model.kv_heads=1"), ("parallel=ulysses", "parallel.data=1", "parallel.tensor=2", "parallel.replicate_kv=true")),
    ],
    ids=lambda v: "-".join(x.split("=")[-1] for x in v) or "gpt",
)  # fmt: skip
def test_losses_and_norms_are_those_of_one_rank(tmp_path, model, layout):
    assert_same(train(tmp_path, *SGD, *model, *layout, evaluate=True), reference(*SGD, *model))


def test_ranks_with_few_tokens_weigh_by_their_tokens(tmp_path):
    """NVIDIA/Megatron-LM#906 (loss times the context degree), PrimeIntellect-ai/prime-rl PR#1957 (a mean of the ranks' means): of four
    samples 16, 9, 5 and 1 tokens count."""
    layouts = {
        "data 4": ("parallel.data=4",),
        "data 2 x ring 2": ("parallel=context", "parallel.data=2"),
        "data 2 x ulysses 2 zero3": ("parallel=ulysses", "parallel.data=2", "+strategy=zero3"),
        "ring 4": ("parallel=context", "parallel.context=4", "parallel.data=1", "train.micro_batch=2"),
    }
    same = ("model.dropout=0", "model.vocab=301", "train.global_batch=4")
    calls = [(spec_of(tmp_path / name, *same, *layout), (16, 9, 5, 1)) for name, layout in layouts.items()]
    found = zip(*run_ranks(4, packed, against_dense.compare, calls, timeout=120), strict=True)
    assert {name: wrong for name, wrong in zip(layouts, found, strict=True) if any(wrong)} == {}


def refusals(*overrides: str) -> Any:
    return [(p.key, p.reason + " " + p.remedy) for p in planned("parallel.data=1", *overrides)[0].problems]


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["parallel.context=2", "data.sequence=18"], "parallel.context", "multiple of 4"),
        (["parallel=ulysses", "data.sequence=17"], "parallel.context", "multiple of 2"),
        (["parallel=ulysses", "parallel.context=8"], "parallel.context", "Legal values: 1, 2, 4"),
        (["parallel.context=2", "parallel.context_method=rings"], "parallel.context_method", "ring"),
        (["parallel=context", "model=hf", "+model.options.model_type=llama", "model.dropout=0"], "parallel.context", "gpt, llama or bert"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_legal_values(overrides, key, text):
    assert any(k == key and text in words for k, words in refusals(*overrides)), refusals(*overrides)
