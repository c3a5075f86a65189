"""Models of transformers: by config and from a folder, equal to transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partita.config.schema import DataConfig, ModelConfig, OptimizerConfig
from partita.errors import ConfigError
from partita.models.hf import make_hf
from partita.plan.plan import Plan
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.optimizers import make_adamw
from partita.train.run import weight_source

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {"vocab_size": 67, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "llama": lambda: transformers.LlamaConfig(**SMALL, hidden_size=32, intermediate_size=48, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, hidden_size=32, intermediate_size=48, num_key_value_heads=2, head_dim=8),
    "bert": lambda: transformers.BertConfig(**SMALL, hidden_size=32, intermediate_size=48, architectures=["BertForMaskedLM"]),
}


def engine_of(path: Path, **model: Any) -> StateEngine:
    config = SimpleNamespace(model=ModelConfig(name="hf", path=str(path), **model), data=DataConfig(sequence=8))
    with torch.device("meta"):
        built = make_hf(config, 67)
    optimizer = OptimizerConfig()
    engine = StateEngine(built, Plan(), Mesh(Plan().layout, 0, torch.device("cpu")), optimizer, make_adamw(optimizer))
    engine.materialize(weight_source(built, seed=3))
    return engine


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_folder_gives_the_same_logits_as_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    theirs = kind.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = engine_of(tmp_path).model.eval()
    ids = torch.randint(67, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    assert ours.partita_loss == ("masked" if name == "bert" else "causal")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_config_alone_gives_random_weights_by_name(name: str, tmp_path: Path) -> None:
    CONFIGS[name]().save_pretrained(tmp_path)
    one, two = engine_of(tmp_path).model.eval(), engine_of(tmp_path).model.eval()
    ids = torch.randint(67, (2, 8))
    with torch.no_grad():
        logits = one(ids)
        assert torch.equal(logits, two(ids))
    assert logits.isfinite().all()
    matrices = [p for n, p in one.named_parameters() if p.dim() == 2 and "weight" in n]
    assert all(0.005 < p.std().item() < 0.2 for p in matrices)


def test_packed_documents_are_as_if_alone(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    model, ids = engine_of(tmp_path).model.eval(), torch.randint(67, (1, 8))
    with torch.no_grad():
        packed = model(ids, positions=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), documents=torch.tensor([[0] * 3 + [1] * 5]))
        alone = torch.cat([model(ids[:, :3]), model(ids[:, 3:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    CONFIGS["gpt2"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.options\.nonsense"):
        engine_of(tmp_path, options={"nonsense": 1})
    with pytest.raises(ConfigError, match=r"model\.weights"):
        engine_of(tmp_path, weights="load")
    with pytest.raises(ConfigError, match=r"config\.json"):
        engine_of(tmp_path / "nowhere")
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 67
