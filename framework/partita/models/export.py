"""From a checkpoint to a folder that transformers loads with `from_pretrained`. Needs no ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from partita.errors import CheckpointError, ConfigError, did_you_mean

State = dict[str, torch.Tensor]


def export_run(source: Path, out: Path) -> None:
    """Write `config.json` and `model.safetensors` (float32) of a run's folder, or of one of its checkpoints, into the folder `out`.

    Raises CheckpointError where there is no complete checkpoint, and ConfigError for a model that transformers has no class for.
    """
    from partita.train.checkpoint import read_weights

    run, checkpoint = _locate(source)
    config = yaml.safe_load((run / "config.yaml").read_text())
    name = config["model"]["name"]
    if name not in EXPORTERS:
        raise ConfigError(f"model.name: {name!r} can't be exported; {did_you_mean(name, EXPORTERS)}")
    state = {k: v.float() for k, v in read_weights(checkpoint).items()}
    described, weights = EXPORTERS[name](config, state)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    save_file({k: v.contiguous() for k, v in weights.items()}, str(out / "model.safetensors"), metadata={"format": "pt"})


def _locate(source: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of either."""
    source = source.absolute()
    if (source / "config.yaml").exists():
        pointer = source / "checkpoints" / "latest"
        if not pointer.exists():
            raise CheckpointError(f"{source} has no complete checkpoint")
        return source, source / "checkpoints" / pointer.read_text().strip()
    if (source.parents[1] / "config.yaml").exists():
        return source.parents[1], source
    raise CheckpointError(f"{source} is neither a run's folder (config.yaml) nor a checkpoint inside one")


def _blocks(state: State) -> int:
    return 1 + max(int(k.split(".")[1]) for k in state if k.startswith("blocks."))


def export_gpt(config: dict[str, Any], state: State) -> tuple[dict[str, Any], State]:
    """GPT2LMHeadModel, whose Conv1D weights are [in, out]."""
    m = config["model"]
    vocab, width = state["embed.weight"].shape
    tied = "head.weight" not in state
    described = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab,
        "n_positions": state["positions.weight"].shape[0],
        "n_embd": width,
        "n_layer": m["layers"],
        "n_head": m["heads"],
        "n_inner": state["blocks.0.up.weight"].shape[0],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": m["dropout"],
        "embd_pdrop": m["dropout"],
        "attn_pdrop": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    out = {"transformer.wte.weight": state["embed.weight"], "transformer.wpe.weight": state["positions.weight"]}
    names = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "qkv": "attn.c_attn",
        "proj": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    for i in range(_blocks(state)):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                value = state[f"blocks.{i}.{ours}.{kind}"]
                out[f"transformer.h.{i}.{theirs}.{kind}"] = value.t() if value.dim() == 2 else value
    out |= {f"transformer.ln_f.{kind}": state[f"norm.{kind}"] for kind in ("weight", "bias")}
    if not tied:
        out["lm_head.weight"] = state["head.weight"]
    return described, out


def export_llama(config: dict[str, Any], state: State) -> tuple[dict[str, Any], State]:
    """LlamaForCausalLM."""
    m = config["model"]
    vocab, width = state["embed.weight"].shape
    tied = "head.weight" not in state
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": state["blocks.0.up.weight"].shape[0],
        "num_hidden_layers": m["layers"],
        "num_attention_heads": m["heads"],
        "num_key_value_heads": m["kv_heads"] or m["heads"],
        "max_position_embeddings": m["context"] or config["data"]["sequence"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": m["rope_base"]},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    names = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "proj": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    out = {"model.embed_tokens.weight": state["embed.weight"], "model.norm.weight": state["norm.weight"]}
    for i in range(_blocks(state)):
        out |= {f"model.layers.{i}.{theirs}.weight": state[f"blocks.{i}.{ours}.weight"] for ours, theirs in names.items()}
    if not tied:
        out["lm_head.weight"] = state["head.weight"]
    return described, out


def export_bert(config: dict[str, Any], state: State) -> tuple[dict[str, Any], State]:
    """BertForMaskedLM with one token type, whose embedding is zero."""
    m = config["model"]
    vocab, width = state["embed.weight"].shape
    described = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": state["blocks.0.up.weight"].shape[0],
        "num_hidden_layers": m["layers"],
        "num_attention_heads": m["heads"],
        "max_position_embeddings": state["positions.weight"].shape[0],
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": m["dropout"],
        "attention_probs_dropout_prob": 0.0,
    }
    e = "bert.embeddings"
    out = {
        f"{e}.word_embeddings.weight": state["embed.weight"],
        f"{e}.position_embeddings.weight": state["positions.weight"],
        f"{e}.token_type_embeddings.weight": torch.zeros(1, width),
    }
    both = ("weight", "bias")
    out |= {f"{e}.LayerNorm.{k}": state[f"norm.{k}"] for k in both}
    names = {
        "proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm2": "output.LayerNorm",
    }
    for i in range(_blocks(state)):
        layer = f"bert.encoder.layer.{i}"
        for kind in both:
            parts = state[f"blocks.{i}.qkv.{kind}"].chunk(3)
            out |= {f"{layer}.attention.self.{n}.{kind}": p for n, p in zip(("query", "key", "value"), parts, strict=True)}
            out |= {f"{layer}.{theirs}.{kind}": state[f"blocks.{i}.{ours}.{kind}"] for ours, theirs in names.items()}
    head = "cls.predictions"
    out |= {f"{head}.transform.dense.{k}": state[f"transform.{k}"] for k in both}
    out |= {f"{head}.transform.LayerNorm.{k}": state[f"transform_norm.{k}"] for k in both}
    out[f"{head}.bias"] = state["head.bias"]
    return described, out


def export_hf(config: dict[str, Any], state: State) -> tuple[dict[str, Any], State]:
    """The same architecture that came in."""
    from partita.models.hf import PREFIX, load_config

    described = load_config(config["model"]["path"], config["model"]["options"]).to_dict()
    return described, {k.removeprefix(PREFIX): v for k, v in state.items()}


EXPORTERS: dict[str, Callable[[dict[str, Any], State], tuple[dict[str, Any], State]]] = {
    "gpt": export_gpt,
    "llama": export_llama,
    "bert": export_bert,
    "hf": export_hf,
}
