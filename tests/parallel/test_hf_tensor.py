"""Hugging Face models on tensor ranks: logits, losses and all gradients are those of the dense model."""

from __future__ import annotations

from typing import Any

import dense
import pytest
from pool import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"kv_heads": 2},
    "qwen2": {"kv_heads": 2},
    "qwen3": {"kv_heads": 2, "head_dim": 8},
    "mistral": {"kv_heads": 2, "sliding_window": None},
    "bert": {},
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 16},
    "phi": {"kv_heads": 4},
    "phi3": {"kv_heads": 2, "pad_token_id": None},
    "gpt_neox": {},
    "olmo2": {"kv_heads": 4},
    "gemma2": {"kv_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("kind", CASES)
def test_a_cut_model_is_the_dense_one(kind):
    for rank, wrong in enumerate(run_ranks(2, dense.compare, kind, CASES[kind], {})):
        assert not wrong, (rank, wrong)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_head_of_keys_may_lie_on_several_ranks(kind):
    for wrong in run_ranks(4, dense.compare, kind, {"kv_heads": 2}, {"spread_kv": True}):
        assert not wrong, wrong
