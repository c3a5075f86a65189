"""Hugging Face models by config and by folder, without network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import VOCAB, build, make_config, spread

from partita.errors import ConfigError, PartitaError
from partita.models.export import export_hf
from partita.models.hf import make_hf
from partita.models.init import fill, initialize
from partita.models.noise import Noise
from partita.runtime.rng import name_generator
from partita.state.units import bind_parameters, find_units

CAUSAL = ("gpt2", "llama", "mistral", "qwen2", "gpt_neox")
MASKED = ("bert", "roberta", "distilbert")
SMALL = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 48},
    "roberta": {"pad_token_id": 1, "max_position_embeddings": 18},
}
SMALL |= {"mistral": {"sliding_window": None}}


def by_type(kind: str, **model: Any) -> Any:
    options = {"model_type": kind} | SMALL.get(kind, {}) | model.pop("options", {})
    return make_config("hf", options=options, **model)


def meta(config: Any, vocab: int = VOCAB) -> Any:
    with torch.device("meta"):
        return make_hf(config, vocab)


def stored(model: Any) -> Any:
    """The model with the values of its source."""

    def write(name: str, tensor: torch.Tensor) -> None:
        tensor.copy_(model.partita_weights(name, tuple(tensor.shape)))

    return fill(model, write).eval()


def save(kind: str, folder: Path, **options: Any) -> Any:
    """A random model of transformers in a folder."""
    with torch.device("meta"):
        ours = make_hf(by_type(kind, options=options), VOCAB)
    torch.manual_seed(1)
    theirs = spread(type(ours.inner)(ours.inner.config)).eval()
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("kind", [*CAUSAL, *MASKED, "mixtral"])
def test_a_folder_gives_its_own_logits(kind: str, tmp_path: Path, ids: torch.Tensor) -> None:
    theirs = save(kind, tmp_path)
    ours = stored(meta(make_config("hf", path=str(tmp_path))))
    assert ours.partita_loss == ("masked" if kind in MASKED else "causal")
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)


@pytest.mark.parametrize("kind", [*CAUSAL, *MASKED, "mixtral"])
def test_random_weights_follow_the_models_own_rules(kind: str) -> None:
    ours = initialize(meta(by_type(kind)), 3)
    assert ours.partita_weights is None
    torch.manual_seed(0)
    theirs = type(ours.inner)(ours.inner.config)
    assert not any(t.is_meta for t in [*ours.parameters(), *ours.buffers()])
    for (name, a), b in zip(ours.inner.named_parameters(), theirs.parameters(), strict=True):
        assert a.isfinite().all(), name
        assert a.mean().item() == pytest.approx(b.mean().item(), abs=0.01), name
        assert a.float().std().item() == pytest.approx(b.float().std().item(), rel=0.25, abs=1e-3), name
    for (name, a), b in zip(ours.inner.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_gpt2_scales_its_branches() -> None:
    ours = initialize(meta(by_type("gpt2", width=128, layers=8)), 3).inner.transformer.h[0]
    assert ours.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert ours.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_weights_depend_on_name_and_seed_and_leave_the_generator_alone() -> None:
    model, name = meta(by_type("llama")), "inner.model.layers.1.mlp.up_proj.weight"
    shape = model.get_parameter(name).shape
    before = torch.get_rng_state()
    a, b, c = (torch.empty(shape) for _ in range(3))
    model.init_parameter(name, a, name_generator(3, name))
    model.init_parameter("inner.model.norm.weight", torch.empty(32), name_generator(3, "x"))
    model.init_parameter(name, b, name_generator(3, name))
    model.init_parameter(name, c, name_generator(4, name))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("kind", [*CAUSAL, "bert", "roberta"])
def test_packed_documents_are_separate_documents(kind: str, ids: torch.Tensor) -> None:
    model = spread(initialize(meta(by_type(kind, pack=True)), 3).eval())
    ids = ids.clamp(min=2)  # RoBERTa counts no positions for padding
    lengths = (5, 8, 3)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(3, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1)
    with torch.no_grad():
        packed = model(ids, positions=positions, documents=documents)
        apart = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
    assert torch.allclose(packed, apart, atol=5e-5)


@pytest.mark.parametrize(
    ("kind", "options", "reason"), [("mistral", {"sliding_window": 8}, "sliding window"), ("mamba", {}, "no positions")]
)
def test_packing_is_refused_with_a_reason(kind: str, options: dict[str, Any], reason: str) -> None:
    config = by_type(kind, options=options, pack=True) if kind != "mamba" else None
    if config is None:
        config = make_config("hf", options={"model_type": "mamba"}, pack=True)
        with pytest.raises(ConfigError, match="num_attention_heads"):
            meta(config)
        return
    with pytest.raises(ConfigError, match=reason):
        meta(config)


def test_tied_weights_are_one_parameter(tmp_path: Path, ids: torch.Tensor) -> None:
    model = meta(by_type("gpt2"))
    tied = [b for b in bind_parameters(model) if b.aliases]
    assert [(b.name, b.aliases, b.unit) for b in tied] == [("inner.transformer.wte.weight", ("inner.lm_head.weight",), "root")]
    assert [n for n, _ in find_units(model)] == ["inner.transformer.h.0", "inner.transformer.h.1"]
    done = initialize(model, 3)
    assert done.inner.lm_head.weight is done.inner.transformer.wte.weight
    done(ids).sum().backward()
    assert all(p.grad is not None for p in done.parameters())


def test_names_without_the_base_prefix(tmp_path: Path, ids: torch.Tensor) -> None:
    """As in the published GPT-2, whose files were written from the base model."""
    theirs = save("gpt2", tmp_path)
    theirs.transformer.save_pretrained(tmp_path)
    ours = stored(meta(make_config("hf", path=str(tmp_path))))
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "mixtral"])
def test_export_gives_the_model_back(kind: str, tmp_path: Path, ids: torch.Tensor) -> None:
    config = by_type(kind, context=16)
    ours = spread(initialize(meta(config), 3).eval())
    export_hf(config.model, {n: p.detach() for n, p in ours.named_parameters()}, tmp_path / "out")
    theirs = type(ours.inner).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)
    assert not any(p.is_meta for p in stored(meta(make_config("hf", path=str(tmp_path / "out")))).parameters())


def test_our_export_trains_on_as_a_hugging_face_model(tmp_path: Path, ids: torch.Tensor) -> None:
    first = spread(build("gpt"))
    export_hf(make_config("gpt").model, dict(first.named_parameters()), tmp_path / "out")
    ours = stored(meta(make_config("hf", path=str(tmp_path / "out"))))
    with torch.no_grad():
        assert torch.allclose(first(ids), ours(ids), atol=1e-4)


def test_no_dropout_of_torchs_generator(ids: torch.Tensor) -> None:
    model = initialize(meta(by_type("bert")), 3).train()
    assert torch.equal(model(ids), model(ids))
    assert not any(m.p for m in model.modules() if isinstance(m, torch.nn.Dropout))
    with pytest.raises(PartitaError, match="no dropout noise"):
        model(ids, noise=Noise(1, 1, torch.arange(3)))


def test_flops_count_matrices_and_attention() -> None:
    llama, gpt = meta(by_type("llama", options={"intermediate_size": 64})), meta(by_type("gpt2"))
    assert llama.flops_per_token(16) == 6 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * VOCAB) + 12 * 2 * 32 * 16
    assert gpt.flops_per_token(16) == 6 * (2 * 12 * 32 * 32 + 32 * VOCAB) + 12 * 2 * 32 * 16


@pytest.mark.parametrize(
    ("model", "vocab", "words"),
    [
        ({}, VOCAB, "model.path: hf needs a folder"),
        ({"options": {"model_type": "lama"}}, VOCAB, "did you mean 'llama'"),
        ({"options": {"model_type": "llama", "hiden_size": 4}}, VOCAB, "did you mean 'hidden_size'"),
        ({"options": {"model_type": "llama"}, "dropout": 0.1}, VOCAB, "model.dropout=0"),
        ({"options": {"model_type": "llama"}, "weights": "load"}, VOCAB, "model.path, which is not set"),
        ({"options": {"model_type": "llama"}, "weights": "lode"}, VOCAB, "none of auto, load, random"),
        ({"options": {"model_type": "llama"}, "context": 8}, VOCAB, "the model has 8 positions"),
        ({"options": {"model_type": "t5"}}, VOCAB, "neither a causal nor a masked"),
        ({"path": "/no/such/folder"}, VOCAB, "no config.json in /no/such/folder"),
    ],
)
def test_mistakes_are_named(model: dict[str, Any], vocab: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        meta(make_config("hf", **model), vocab)
    assert words in str(caught.value)


def test_a_folder_that_does_not_fit(tmp_path: Path) -> None:
    theirs = save("llama", tmp_path)
    path = str(tmp_path)
    with pytest.raises(ConfigError, match="61 token ids and the tokenizer 99"):
        meta(make_config("hf", path=path), 99)
    with pytest.raises(ConfigError, match=r"has shape .*the config makes it"):
        meta(make_config("hf", path=path, options={"intermediate_size": 7}))
    assert meta(make_config("hf", path=path, weights="random")).partita_weights is None
    theirs.model.save_pretrained(tmp_path)
    theirs.config.tie_word_embeddings = False
    theirs.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks 1 weights of LlamaForCausalLM"):
        meta(make_config("hf", path=path))


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert meta(make_config("hf", path=str(tmp_path))).partita_weights is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ConfigError, match="no pickle is read"):
        meta(make_config("hf", path=str(tmp_path)))


def test_the_folder_may_name_a_decoder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would see the tokens it predicts"):
        meta(by_type("bert", options={"architectures": ["BertLMHeadModel"]}))
    assert meta(by_type("bert", options={"is_decoder": True})).partita_loss == "causal"
    assert isinstance(meta(by_type("bert")).inner, transformers.BertForMaskedLM)
