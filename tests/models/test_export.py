"""Exported folders against transformers' own models, and the checkpoint of a run as their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import VOCAB, build, make_config, spread

from partita.errors import ConfigError
from partita.models import export
from partita.models.export import export_hf, save_weights

CASES = [
    ("gpt", {}, "GPT2LMHeadModel"),
    ("gpt", {"tie_embeddings": False, "ffn": 48, "context": 20, "vocab": VOCAB}, "GPT2LMHeadModel"),
    ("llama", {}, "LlamaForCausalLM"),
    ("llama", {"tie_embeddings": False, "kv_heads": 2, "rope_base": 5e5}, "LlamaForCausalLM"),
    ("bert", {}, "BertForMaskedLM"),
    ("bert", {"tie_embeddings": False, "ffn": 40}, "BertForMaskedLM"),
]


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint gives: each parameter once, under its first name."""
    return {name: p.detach() for name, p in model.named_parameters()}


def write(name: str, out: Path, **options: Any) -> torch.nn.Module:
    model = spread(build(name, **options))
    node = make_config(name, **options).model
    node.context = node.context or 16
    assert export_hf(node, whole_state(model), out) == out
    return model


@pytest.mark.parametrize(("name", "options", "architecture"), CASES)
def test_equal_logits(name: str, options: dict[str, Any], architecture: str, tmp_path: Path, ids: torch.Tensor) -> None:
    ours = write(name, tmp_path / "out", **options)
    load = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    theirs, info = load.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == architecture
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        want, got = ours(ids), theirs.eval()(ids).logits
    assert want.std() > 0.3
    assert (want - got).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert tied == options.get("tie_embeddings", True)


def test_dtype_is_kept(tmp_path: Path) -> None:
    state = {n: p.to(torch.bfloat16) for n, p in whole_state(build("gpt")).items()}
    export_hf(make_config("gpt").model, state, tmp_path / "out")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_shards_are_read_back(tmp_path: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_weights, "__defaults__", (20_000,))
    ours = write("llama", tmp_path / "out")
    index = json.loads((tmp_path / "out" / export.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in ours.parameters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, atol=2e-5)


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    write("gpt", tmp_path / "out")
    write("llama", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("years of work")
    with pytest.raises(ConfigError, match="is no export"):
        write("gpt", tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1").exists()


def test_a_model_without_counterpart(tmp_path: Path) -> None:
    node = make_config("gpt").model
    node.name = "lama"
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        export_hf(node, {}, tmp_path / "out")
    assert not list(tmp_path.iterdir())
