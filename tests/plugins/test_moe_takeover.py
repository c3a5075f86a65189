"""Experts of Hugging Face models, run by our layers: logits and gradients as in transformers, files in and out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "models"), str(ROOT / "train")]

from small_models import VOCAB, make_config, spread

from partita.errors import ConfigError
from partita.models.export import export_hf
from partita.models.hf import make_hf
from partita.models.init import fill
from partita.state.parts import Part
from partita_moe.change import add_experts, moe_layers
from partita_moe.config import MoeConfig
from partita_moe.takeover import FAMILIES

SIZES: dict[str, Any] = {"intermediate_size": 48, "num_experts_per_tok": 2}
GROUPED = SIZES | {
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts_per_tok": 2},
    "qwen3_moe": SIZES | {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "intermediate_size": 24, "num_experts_per_tok": 2},
    "deepseek_v3": GROUPED | LATENT | {"n_routed_experts": 6, "first_k_dense_replace": 1},
    "glm4_moe": GROUPED | {"n_routed_experts": 6, "first_k_dense_replace": 0, "norm_topk_prob": False},
}
IDS = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(1))


def moe(**keys: Any) -> Any:
    return SimpleNamespace(moe=MoeConfig(name="hf", **{"balance": "none", **keys}))


def save(kind: str, folder: Path) -> Any:
    """A random model of transformers in a folder, its biases of the choice not zero."""
    with torch.device("meta"):
        ours = make_hf(make_config("hf", options={"model_type": kind} | KINDS[kind]), VOCAB)
    torch.manual_seed(1)
    theirs = spread(type(ours.inner)(ours.inner.config)).eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.2)
    theirs.save_pretrained(folder)
    return theirs


def taken(folder: Path, **keys: Any) -> Any:
    """The folder's model with our layers."""
    with torch.device("meta"):
        model = add_experts(make_hf(make_config("hf", path=str(folder)), VOCAB), moe(**keys))
    return fill(model, lambda name, tensor: tensor.copy_(model.partita_weights(name, tuple(tensor.shape)))).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_files_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = save(kind, tmp_path / "in")
    ours = taken(tmp_path / "in")
    assert ours.partita_weights._source._whole is None, "experts should be read one by one, not the model as a whole"
    layers = moe_layers(ours)
    assert layers and all(not torch.equal(layer.router_weight(), torch.zeros(())) for _, layer in layers)
    got, want = ours(IDS), theirs(IDS).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for logits in (got, want):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    true = dict(theirs.named_parameters())
    names = [n for n, _ in ours.inner.named_parameters()]
    assert set(names) == set(true)
    for name, p in ours.inner.named_parameters():
        torch.testing.assert_close(p.grad, true[name].grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")

    node = make_config("hf", path=str(tmp_path / "in")).model
    node.context = 16
    state = {n: t.detach() for n, t in [*ours.named_parameters(), *ours.named_buffers()]}
    export_hf(node, state, tmp_path / "out")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS).logits, theirs(IDS).logits)


def test_a_rank_reads_its_own_experts_only(tmp_path: Path) -> None:
    theirs = save("mixtral", tmp_path)
    source = taken(tmp_path).partita_weights
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = dict(theirs.named_parameters())[name]
    part = Part(tuple(whole.shape), 0, ((1, 3),))
    asked: list[str] = []
    handle = source._source._handle
    source._source._handle = lambda place: asked.append(place) or handle(place)
    assert torch.equal(source.part(f"inner.{name}", part), whole[1:3])
    assert len(asked) == 4 and all(".experts.1." in a or ".experts.2." in a for a in asked)


def test_what_cannot_be_taken_over_is_refused(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    with torch.device("meta"):
        dense = make_hf(make_config("hf", options={"model_type": "llama"}), VOCAB)
        with pytest.raises(ConfigError, match=r"moe\.name: LlamaForCausalLM has no expert layers"):
            add_experts(dense, moe())
        with pytest.raises(ConfigError, match=r"moe\.balance: MixtralSparseMoeBlock has no bias"):
            add_experts(make_hf(make_config("hf", path=str(tmp_path)), VOCAB), moe(balance="bias"))


def test_the_table_names_what_transformers_has() -> None:
    found = {
        name
        for kind in KINDS
        for name in dir(__import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["x"]))
        if name in FAMILIES
    }
    assert found == set(FAMILIES)


@pytest.mark.parametrize(("key", "value"), [("experts", 4), ("top_k", 1), ("scale", 2.0)])
def test_what_the_model_says_itself_is_refused(plan_of, key: str, value: Any) -> None:
    (found,) = plan_of(launch__ranks=2, moe__name="hf", **{f"moe__{key}": value}).problems
    assert found.key == f"moe.{key}" and "model's own" in found.reason
