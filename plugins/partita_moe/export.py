"""Models with experts as transformers knows them: a Llama with Mixtral's routing is a Mixtral."""

from __future__ import annotations

from typing import Any

from partita.config.plain import from_plain
from partita.errors import ConfigError
from partita.models.export import Translate, Translated, Weights, llama_frame
from partita_moe.config import MoeConfig
from partita_moe.routing import SOFTMAX_CHOSEN
from partita_moe.routings import routing_of

NEITHER = "    -> partita.train.loading.read_weights reads the checkpoint's weights by name"


def translator(config: dict[str, Any]) -> Translate:
    """The function from our weights to those of MixtralForCausalLM. config: of a run, plain.

    Raises ConfigError with the key that keeps a model from being a Mixtral.
    """
    moe = from_plain(config["moe"], MoeConfig)
    routing, model = routing_of(moe), config["model"]["name"]
    reasons = {
        "model.name": f"transformers has no {model} with experts" if model != "llama" else "",
        "moe.name": f"Mixtral has no gates like those of {moe.name!r}" if routing.gate != SOFTMAX_CHOSEN else "",
        "moe.shared": "Mixtral has no shared experts" if routing.shared else "",
        "moe.every": "in a Mixtral every block has experts" if moe.every > 1 else "",
        "moe.groups": "Mixtral has no groups of experts" if routing.groups > 1 else "",
        "moe.balance": "Mixtral has no balancing bias" if routing.balance == "bias" else "",
        "moe.capacity": "Mixtral drops no tokens" if routing.capacity is not None else "",
    }
    for key, reason in reasons.items():
        if reason:
            raise ConfigError(f"{key}: {reason}, so this model can't be written for transformers\n{NEITHER}")
    return lambda node, state: to_mixtral(node, state, routing.top_k, routing.aux_weight)


def to_mixtral(model: Any, state: Weights, top_k: int, aux_weight: float) -> Translated:
    """For MixtralForCausalLM, whose files hold each expert by itself: w1 (gate), w3 (up) and w2 (down), [out, in] each."""
    config, weights = llama_frame("MixtralForCausalLM", "mixtral", model, state)
    experts, inner, _ = state["blocks.0.mlp.experts.down"].shape
    config |= {
        "intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "router_aux_loss_coef": aux_weight,
        "sliding_window": None,
    }
    for i in range(model.layers):
        block, prefix = f"blocks.{i}.mlp", f"model.layers.{i}.block_sparse_moe"
        weights[f"{prefix}.gate.weight"] = state[f"{block}.router"]
        for e in range(experts):
            gate, up = state[f"{block}.experts.gate_up"][e].t().chunk(2)
            down = state[f"{block}.experts.down"][e].t()
            weights |= {
                f"{prefix}.experts.{e}.{name}.weight": w for name, w in zip(("w1", "w3", "w2"), (gate, up, down), strict=True)
            }
    return config, weights
