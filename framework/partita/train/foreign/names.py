"""Names and shapes of other programs' models -> those of the reference models. The same function serves weights and moments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from partita.train.foreign.source import Weights

# theirs in a block -> ours
GPT2 = {
    "ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out", "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}  # fmt: skip
LLAMA = {
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.o_proj": "attention.out", "mlp.down_proj": "mlp.down",
}  # fmt: skip
BERT = {
    "attention.output.dense": "attention.out", "attention.output.LayerNorm": "norm1", "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down", "output.LayerNorm": "norm2",
}  # fmt: skip


def bare(theirs: Mapping[str, torch.Tensor]) -> Weights:
    """Without the prefixes that wrappers add."""
    out = {}
    for name, value in theirs.items():
        for prefix in ("_orig_mod.", "module."):
            name = name.removeprefix(prefix)
        out[name] = value
    return out


def from_gpt2(theirs: Weights, transposed: bool = True) -> Weights:
    """GPT2LMHeadModel, whose matrices are [in, out] (`transposed`), or nanoGPT, whose matrices are [out, in].

    Biases that the model doesn't have are zero here.
    """
    theirs = _without(theirs, "transformer.", r"\.attn\.(masked_)?bias$")
    out = _tied({"tokens.weight": "wte.weight", "positions.weight": "wpe.weight"}, theirs, "lm_head.weight", "wte.weight")
    blocks = _blocks(theirs, "h", GPT2)
    if transposed:
        blocks = {n: w.t().contiguous() if w.ndim == 2 else w for n, w in blocks.items()}
    out |= blocks | {f"norm.{k}": theirs[f"ln_f.{k}"] for k in ("weight", "bias") if f"ln_f.{k}" in theirs}
    for name in [n for n in out if n.endswith(".weight") and ("norm" in n or n.startswith("blocks."))]:
        out.setdefault(name.removesuffix("weight") + "bias", out[name].new_zeros(out[name].shape[0]))
    return out


def from_llama(theirs: Weights) -> Weights:
    """LlamaForCausalLM: queries, keys and values become one matrix, gate and up another."""
    theirs = _without(theirs, "model.", r"rotary_emb\.inv_freq$")
    out = _tied(
        {"tokens.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}, theirs, "lm_head.weight", "embed_tokens.weight"
    )
    out |= _blocks(theirs, "layers", LLAMA)
    for i in range(_count(theirs, "layers")):
        at = f"layers.{i}."
        out[f"blocks.{i}.attention.qkv.weight"] = torch.cat([theirs[f"{at}self_attn.{k}_proj.weight"] for k in "qkv"])
        out[f"blocks.{i}.mlp.gate_up.weight"] = torch.cat([theirs[f"{at}mlp.{k}_proj.weight"] for k in ("gate", "up")])
    return out


def from_bert(theirs: Weights) -> Weights:
    """BertForMaskedLM. Its first token type is added to the positions, since the reference model has no token types."""
    theirs = _without(theirs, "bert.", r"position_ids$|^pooler\.|seq_relationship")
    types = theirs["embeddings.token_type_embeddings.weight"]
    out = {
        "tokens.weight": theirs["embeddings.word_embeddings.weight"],
        "positions.weight": theirs["embeddings.position_embeddings.weight"] + types[:1],
        "head.bias": theirs["cls.predictions.bias"],
    }
    heads = {"embeddings.LayerNorm": "norm", "cls.predictions.transform.dense": "transform.dense"}
    heads["cls.predictions.transform.LayerNorm"] = "transform.norm"
    out |= {f"{ours}.{k}": theirs[f"{name}.{k}"] for name, ours in heads.items() for k in ("weight", "bias")}
    out |= _blocks(theirs, "encoder.layer", BERT)
    for i in range(_count(theirs, "encoder.layer")):
        for kind in ("weight", "bias"):
            at = f"encoder.layer.{i}.attention.self."
            parts = [theirs[f"{at}{k}.{kind}"] for k in ("query", "key", "value")]
            out[f"blocks.{i}.attention.qkv.{kind}"] = torch.cat(parts)
    head = theirs.get("cls.predictions.decoder.weight")
    if head is not None and not torch.equal(head, out["tokens.weight"]):
        out["head.weight"] = head
    return out


def _without(theirs: Weights, prefix: str, unused: str) -> Weights:
    return {n.removeprefix(prefix): w for n, w in bare(theirs).items() if not re.search(unused, n.removeprefix(prefix))}


def _tied(table: dict[str, str], theirs: Weights, head: str, embedding: str) -> Weights:
    """The outer weights; the head only where it is not the embedding."""
    out = {ours: theirs[name] for ours, name in table.items()}
    if head in theirs and not torch.equal(theirs[head], theirs[embedding]):
        out["head.weight"] = theirs[head]
    return out


def _count(theirs: Weights, prefix: str) -> int:
    found = [int(m[1]) for n in theirs if (m := re.match(re.escape(prefix) + r"\.(\d+)\.", n))]
    return max(found, default=-1) + 1


def _blocks(theirs: Weights, prefix: str, table: dict[str, str]) -> Weights:
    out = {}
    for i in range(_count(theirs, prefix)):
        for name, ours in table.items():
            for kind in ("weight", "bias"):
                if (key := f"{prefix}.{i}.{name}.{kind}") in theirs:
                    out[f"blocks.{i}.{ours}.{kind}"] = theirs[key]
    return out


# ------------------------------------------------------------------ configs


def gpt2_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from a GPT-2 config of transformers."""
    return {
        "name": "gpt", "layers": c["n_layer"], "width": c["n_embd"], "heads": c["n_head"], "ffn": c.get("n_inner"),
        "vocab": c["vocab_size"], "context": c["n_positions"], "tie_embeddings": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def llama_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from a Llama config of transformers."""
    rope = (c.get("rope_parameters") or {}).get("rope_theta") or c.get("rope_theta") or 10000.0
    return {
        "name": "llama", "layers": c["num_hidden_layers"], "width": c["hidden_size"], "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads"), "ffn": c["intermediate_size"], "vocab": c["vocab_size"],
        "context": c["max_position_embeddings"], "tie_embeddings": c.get("tie_word_embeddings", False), "rope_base": float(rope),
    }  # fmt: skip


def bert_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from a BERT config of transformers."""
    return {
        "name": "bert", "layers": c["num_hidden_layers"], "width": c["hidden_size"], "heads": c["num_attention_heads"],
        "ffn": c["intermediate_size"], "vocab": c["vocab_size"], "context": c["max_position_embeddings"],
        "tie_embeddings": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def nanogpt_config(c: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig from the `model_args` of nanoGPT."""
    return {
        "name": "gpt", "layers": c["n_layer"], "width": c["n_embd"], "heads": c["n_head"], "vocab": c["vocab_size"],
        "context": c["block_size"], "tie_embeddings": True,
    }  # fmt: skip
