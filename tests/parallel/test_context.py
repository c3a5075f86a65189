"""Context parallel against one rank: attention by itself, and whole runs with packed documents, dropout and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import assert_same, planned, reference, train
from pool import run_ranks
from torch import nn

from partita.models.common import attend, document_mask
from partita.plan.plan import Layout
from partita.runtime.mesh import Mesh
from partita_parallel import blocks
from partita_parallel.context import AXIS, spread_attention

SGD = ("optimizer=sgd", "optimizer.lr=0.05", "train.grad_clip=0")


class _Attention(nn.Module):
    """As far as `spread_attention` looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.mask = attend, document_mask


def attention_parts(
    rank: int, world: int, method: str, kv_heads: int, tokens: int, packed: bool, causal: bool, dtype: str
) -> float:
    """Largest difference, over this rank's tokens, of outputs and gradients from those of whole attention in float32."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(3)
    q, dout = (torch.randn(2, 4, tokens, 8, generator=g) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, tokens, 8, generator=g) for _ in range(2))
    documents = torch.randint(2, (2, tokens), generator=g).cumsum(1) // 3 if packed else None
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = attend(*whole, document_mask(documents, causal), causal)
    expected.backward(dout)
    mesh = Mesh(Layout(context=world), rank, torch.device("cpu"))
    module = _Attention()
    columns = spread_attention(module, method, tokens, mesh.group(AXIS)).columns
    mine = [t[:, :, columns].to(getattr(torch, dtype)).requires_grad_() for t in (q, k, v)]
    mask = module.mask(documents[:, columns] if documents is not None else None, causal)
    got = module.attend(*mine, mask, causal)
    got.backward(dout[:, :, columns].to(got.dtype))
    pairs = [(got, expected), *zip((t.grad for t in mine), (t.grad for t in whole), strict=True)]
    return max(float((a.float() - b[:, :, columns]).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize(
    ("method", "world", "kv_heads"), [("ring", 2, 4), ("ring", 3, 1), ("ring", 4, 2), ("ulysses", 2, 2), ("ulysses", 2, 1)]
)
def test_attention_sees_the_tokens_of_all_ranks(method, world, kv_heads, packed, causal):
    tokens = 12 * world
    assert max(run_ranks(world, attention_parts, method, kv_heads, tokens, packed, causal, "float32")) < 2e-6


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_in_bfloat16(method):
    assert max(run_ranks(2, attention_parts, method, 2, 24, True, True, "bfloat16")) < 0.1


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
