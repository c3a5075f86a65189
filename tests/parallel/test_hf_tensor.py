"""Hugging Face models on tensor ranks: logits, losses and all gradients are those of the dense model."""

from __future__ import annotations

from typing import Any

import dense
from packed import packed
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


def differences(world: int, calls: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, list[Any]]:
    """Kind of model -> what each rank found different."""
    ranks = run_ranks(world, packed, dense.compare, calls, timeout=150)
    return {kind: list(found) for (kind, _, _), found in zip(calls, zip(*ranks, strict=True), strict=True)}


def test_a_cut_model_is_the_dense_one() -> None:
    found = differences(2, [(kind, options, {}) for kind, options in CASES.items()])
    assert {kind: wrong for kind, wrong in found.items() if any(wrong)} == {}


def test_a_head_of_keys_may_lie_on_several_ranks() -> None:
    found = differences(4, [(kind, {"kv_heads": 2}, {"spread_kv": True}) for kind in ("llama", "qwen2")])
    assert {kind: wrong for kind, wrong in found.items() if any(wrong)} == {}
