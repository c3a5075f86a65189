"""Weights of a run as a folder that transformers' `from_pretrained` loads. Needs no transformers for the reference models."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from partita.config.plain import from_plain
from partita.config.schema import ModelConfig
from partita.errors import CheckpointError, ConfigError, did_you_mean
from partita.models import bert, llama
from partita.models.sizes import ffn_size
from partita.plugin.registry import Registry

Weights = dict[str, torch.Tensor]
Translated = tuple[dict[str, Any], Weights]
Translate = Callable[[Any, Weights], Translated]

SHARD_BYTES = 4 << 30  # of one file
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # names that Hugging Face looks for


def export_run(run: Path | str, out: Path | str, checkpoint: Path | str | None = None) -> Path:
    """Write the weights of a run's newest checkpoint, or of the one given, to `out`; returns it. No ranks are started.

    run: a run's folder, or a checkpoint. out: replaced only when everything is written. Raises CheckpointError where there is no
    checkpoint, ConfigError where the model has no counterpart in transformers or `out` is something else than an export.
    """
    from partita.train.index import inspect
    from partita.train.loading import read_weights

    source = checkpoint if checkpoint is not None else run
    config = inspect(source)["extra"].get("config")
    if config is None:
        raise CheckpointError(f"{source} doesn't say which model it holds. It was not written by a training run.")
    model = from_plain(config["model"], ModelConfig)
    model.context = model.context or config["data"]["sequence"]
    weights = read_weights(source, tied=False)
    registry = Registry.load(tuple(config.get("plugins", {}).get("block", ())))
    own = registry.hook.partita_export(config=config, weights=weights)
    return export_hf(model, weights, out, next((translate for translate in own if translate is not None), None))


def export_hf(model: Any, state: Weights, out: Path | str, translate: Translate | None = None) -> Path:
    """Write whole weights by Partita's names (tied ones once) to the folder `out`, with the config that goes with them.

    model: the config node `model`, with its context filled in. translate: instead of the model's own translator.
    """
    out = Path(out).absolute()
    _check_target(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        if model.name == "hf":
            from partita.models.hf import export_inner

            export_inner(model, state, folder)
        else:
            config, weights = (translate or translator(model.name))(model, state)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_weights(weights, folder)
        if out.exists():
            shutil.rmtree(out)
        os.rename(folder, out)
    return out


def _check_target(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
        raise ConfigError(f"{out} exists and is no export\n    -> another folder")


def translator(name: str) -> Translate:
    """The function from our weights to theirs for a reference model. Raises ConfigError for other models."""
    known = {"gpt": to_gpt2, "llama": to_llama, "bert": to_bert}
    if name not in known:
        raise ConfigError(f"model.name: {name!r} has no export\n    -> {did_you_mean(name, [*known, 'hf'])}")
    return known[name]


def save_weights(weights: Weights, folder: Path, limit: int = SHARD_BYTES) -> None:
    """Write safetensors of at most `limit` bytes (a tensor is never cut), with an index where there are several."""
    groups: list[Weights] = [{}]
    size = 0
    for name, tensor in weights.items():
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    names = [WHOLE] if len(groups) == 1 else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        save_file(group, folder / name, metadata={"format": "pt"})
    if len(groups) > 1:
        places = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        total = {"total_size": sum(t.nbytes for t in weights.values())}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": places}, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------ reference models


def _common(architecture: str, kind: str, model: Any, state: Weights) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": state["tokens.weight"].shape[0],
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "dtype": str(state["tokens.weight"].dtype).removeprefix("torch."),
        # The tokenizer's business; without these transformers would assume ids that the vocabulary may not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _blocks(state: Weights, layers: int, table: dict[str, str], prefix: str) -> Weights:
    """Weights of all blocks under their names: table is our name in a block -> theirs."""
    return {f"{prefix}.{i}.{theirs}": state[f"blocks.{i}.{ours}"] for i in range(layers) for ours, theirs in table.items()}


def _linear(pairs: dict[str, str], *kinds: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in pairs.items() for kind in kinds}


def to_gpt2(model: Any, state: Weights) -> Translated:
    """For GPT2LMHeadModel, whose matrices are stored [in, out]."""
    context, width = state["positions.weight"].shape
    config = _common("GPT2LMHeadModel", "gpt2", model, state) | {
        "n_positions": context,
        "n_embd": width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": ffn_size(model, gated=False),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }
    norms = _linear({"norm1": "ln_1", "norm2": "ln_2"}, "weight", "bias")
    matrices = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    weights = {
        "transformer.wte.weight": state["tokens.weight"],
        "transformer.wpe.weight": state["positions.weight"],
        **_blocks(state, model.layers, norms | _linear(matrices, "bias"), "transformer.h"),
        **{n: w.t() for n, w in _blocks(state, model.layers, _linear(matrices, "weight"), "transformer.h").items()},
        "transformer.ln_f.weight": state["norm.weight"],
        "transformer.ln_f.bias": state["norm.bias"],
    }
    if not model.tie_embeddings:
        weights["lm_head.weight"] = state["head.weight"]
    return config, weights


def to_llama(model: Any, state: Weights) -> Translated:
    """For LlamaForCausalLM, which keeps queries, keys, values, gate and up apart."""
    ffn = ffn_size(model, gated=True)
    config, weights = llama_frame("LlamaForCausalLM", "llama", model, state)
    config |= {"attention_bias": False, "mlp_bias": False}
    weights |= _blocks(state, model.layers, {"mlp.down.weight": "mlp.down_proj.weight"}, "model.layers")
    for i in range(model.layers):
        gate, up = state[f"blocks.{i}.mlp.gate_up.weight"].split(ffn)
        weights |= {f"model.layers.{i}.mlp.gate_proj.weight": gate, f"model.layers.{i}.mlp.up_proj.weight": up}
    return config, weights


def llama_frame(architecture: str, kind: str, model: Any, state: Weights) -> Translated:
    """All of a Llama but its feed-forward layers, for an architecture of transformers that has the rest in common with it."""
    width = state["tokens.weight"].shape[1]
    kv_heads, head = model.kv_heads or model.heads, width // model.heads
    config = _common(architecture, kind, model, state) | {
        "hidden_size": width,
        "intermediate_size": ffn_size(model, gated=True),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": model.context,
        "rms_norm_eps": llama.EPS,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "hidden_act": "silu",
    }
    table = {
        "norm1.weight": "input_layernorm.weight",
        "norm2.weight": "post_attention_layernorm.weight",
        "attention.out.weight": "self_attn.o_proj.weight",
    }
    weights = {
        "model.embed_tokens.weight": state["tokens.weight"],
        "model.norm.weight": state["norm.weight"],
        **_blocks(state, model.layers, table, "model.layers"),
    }
    for i in range(model.layers):
        parts = state[f"blocks.{i}.attention.qkv.weight"].split((width, kv_heads * head, kv_heads * head))
        for name, part in zip("qkv", parts, strict=True):
            weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] = part
    if not model.tie_embeddings:
        weights["lm_head.weight"] = state["head.weight"]
    return config, weights


def to_bert(model: Any, state: Weights) -> Translated:
    """For BertForMaskedLM, which keeps queries, keys and values apart and adds a token type."""
    context, width = state["positions.weight"].shape
    config = _common("BertForMaskedLM", "bert", model, state) | {
        "hidden_size": width,
        "intermediate_size": ffn_size(model, gated=False),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": context,
        "type_vocab_size": 2,
        "layer_norm_eps": bert.EPS,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": None,
    }
    pairs = {
        "attention.out": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "norm2": "output.LayerNorm",
    }
    weights = {
        "bert.embeddings.word_embeddings.weight": state["tokens.weight"],
        "bert.embeddings.position_embeddings.weight": state["positions.weight"],
        "bert.embeddings.token_type_embeddings.weight": state["tokens.weight"].new_zeros(2, width),
        **_blocks(state, model.layers, _linear(pairs, "weight", "bias"), "bert.encoder.layer"),
        "cls.predictions.bias": state["head.bias"],
    }
    outer = {"norm": "bert.embeddings.LayerNorm", "transform.dense": "cls.predictions.transform.dense"}
    outer["transform.norm"] = "cls.predictions.transform.LayerNorm"
    for ours, theirs in _linear(outer, "weight", "bias").items():
        weights[theirs] = state[ours]
    for i in range(model.layers):
        for kind in ("weight", "bias"):
            parts = state[f"blocks.{i}.attention.qkv.{kind}"].chunk(3)
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                weights[f"bert.encoder.layer.{i}.attention.self.{name}.{kind}"] = part
    if not model.tie_embeddings:
        weights["cls.predictions.decoder.weight"] = state["head.weight"]
        weights["cls.predictions.decoder.bias"] = state["head.bias"].clone()
    return config, weights
