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

from partita_kernels import attention_piece
from partita_parallel import ring

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


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_turns_meet_each_visible_pair_once(causal, packs):
    """Of all ranks together: what query i sees of key j, by the bounds of the turn in which they meet."""
    size, tokens = 3, 24
    columns = [ring.ring_columns(tokens, rank, size) for rank in range(size)]
    numbers = (torch.rand(2, tokens, generator=torch.Generator().manual_seed(4)) < 0.2).cumsum(1)
    documents = [numbers[:, c] for c in columns] if packs else None
    met = torch.zeros(2, tokens, tokens, dtype=torch.int64)
    for rank in range(size):
        for turn in ring._turns(rank, size, tokens // size, causal):
            low, high = ring._bounds(turn, rank, tokens // size, documents, torch.device("cpu"))
            keys = columns[turn.source][turn.keys]
            j = torch.arange(len(keys))
            seen = (j >= low[:, :, None]) & (j < high[:, :, None])
            met[:, columns[rank][turn.queries][:, None], keys] += seen
    want = torch.ones(2, tokens, tokens, dtype=torch.int64)
    want = want * (numbers[:, :, None] == numbers[:, None]) if packs else want
    assert torch.equal(met, want.tril() if causal else want)


def test_queries_that_see_nothing_in_a_piece_take_nothing_from_it():
    q = k = v = torch.ones(1, 1, 2, 4)
    low = torch.zeros(1, 2, dtype=torch.int32)
    out, lse = attention_piece(q, k, v, low, torch.tensor([[2, 0]], dtype=torch.int32))
    assert out[0, 0, 1].abs().sum() == 0 and lse[0, 0, 1] == -torch.inf
    whole, total = ring.merge(*attention_piece(q, k, v, low, low + 2), out, lse)
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
