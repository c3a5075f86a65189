"""Hugging Face models through the trainer: trained in shards, saved, loaded by transformers; and how much memory loading takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import hf_runs
from pool import run_ranks

from partita.models.export import export_run

KINDS = {
    "gpt2": (), "bert": (), "llama": ("model.kv_heads=2",), "qwen2": ("model.kv_heads=2",),
    "qwen3": ("model.kv_heads=2", "+model.options.head_dim=16"),
}  # fmt: skip
SHAPES = {  # of SmolLM2-135M, and of one a fifth as large with the same proportions
    "small": {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 15, "vocab_size": 12288},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
}


def test_what_is_trained_in_shards_is_what_transformers_loads(tmp_path: Path) -> None:
    specs = [
        hf_runs.spec_of((f"+model.options.model_type={kind}", "zero=stage3", "parallel.data=2", *more), tmp_path / kind)
        for kind, more in KINDS.items()
    ]
    ids = torch.randint(250, (2, 16), generator=torch.Generator().manual_seed(1))
    ours = run_ranks(2, hf_runs.train_and_save, specs, ids, timeout=120)[0]
    for kind, want in zip(KINDS, ours, strict=True):
        auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
        theirs, info = auto.from_pretrained(export_run(tmp_path / kind, tmp_path / f"{kind} out"), output_loading_info=True)
        assert theirs.config.model_type == kind and not info["missing_keys"] and not info["unexpected_keys"], info
        with torch.no_grad():
            torch.testing.assert_close(theirs.eval()(ids).logits, want, rtol=1e-5, atol=1e-5, msg=kind)


@pytest.mark.parametrize(
    "shape",
    ["small", pytest.param("smollm2", marks=pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="540 MB: PARTITA_LONG_TESTS=1"))],
)  # fmt: skip
def test_no_rank_ever_holds_the_whole_model(shape: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=64, tie_word_embeddings=True, **SHAPES[shape]
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="60MB")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    common = ("+adapter=lora", "zero=stage3", "parallel.data=2")
    warm = hf_runs.spec_of((*common, "+model.options.model_type=llama"), tmp_path / "warm")
    spec = hf_runs.spec_of((*common, f"model.path={tmp_path / 'model'}"), tmp_path / "run")
    for peak in run_ranks(2, hf_runs.peak_of_loading, warm, spec, timeout=300):
        assert peak < 1.3 * size, f"{peak / size:.2f} times {size / 1e6:.0f} MB"
