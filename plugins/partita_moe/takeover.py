"""Expert layers of Hugging Face models, run by ours: weights keep their names and forms, so files, plans and exports stay theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from partita.errors import ConfigError
from partita.models.layers import swiglu_halves
from partita_kernels import grouped_matmul
from partita_moe.experts import Experts
from partita_moe.layer import ExpertLayer
from partita_moe.routing import SIGMOID, SIGMOID_ALL, SOFTMAX_ALL, SOFTMAX_CHOSEN, Routing

Tensor = torch.Tensor
BIAS = "e_score_correction_bias"  # a buffer of routers that are balanced without a loss
FORMS = ("gate_up_proj", "down_proj")  # of experts: [E, 2 I, C] and [E, C, I]


@dataclass(frozen=True)
class Family:
    """Layers of one class. gates: (where the chosen are brought to sum to one, where not)."""

    gates: tuple[str, str]
    always: bool = False  # bring them to sum to one without being asked

    def gate(self, router: Any) -> str:
        """The kind of gate of one router."""
        return self.gates[0 if self.always or router.norm_topk_prob else 1]


SOFTMAX = Family((SOFTMAX_CHOSEN, SOFTMAX_ALL))
SIGMOIDS = Family((SIGMOID, SIGMOID_ALL))
FAMILIES: dict[str, Family] = {
    "MixtralSparseMoeBlock": Family((SOFTMAX_CHOSEN, SOFTMAX_CHOSEN), always=True),
    "Qwen2MoeSparseMoeBlock": SOFTMAX,
    "Qwen3MoeSparseMoeBlock": SOFTMAX,
    "OlmoeSparseMoeBlock": SOFTMAX,
    "DeepseekV3MoE": SIGMOIDS,
    "Glm4MoeMoE": SIGMOIDS,
}


def take_over(model: nn.Module, moe: Any) -> nn.Module:
    """Replace the expert layers of `model` in place, on meta or not. Raises ConfigError where there are none that are known."""
    found = [(path, m) for path, m in model.named_modules() if type(m).__name__ in FAMILIES]
    if not found:
        raise ConfigError(
            f"moe.name: {_name(model)} has no expert layers that are known\n"
            f"    -> moe=none trains it as it is; known are {', '.join(FAMILIES)}"
        )
    for path, block in found:
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, TakenLayer(block, routing_of_block(block, moe)))
    return model


def _name(model: Any) -> str:
    return type(getattr(model, "inner", model)).__name__


def routing_of_block(block: Any, moe: Any) -> Routing:
    """What a layer of transformers does, and how `MoeConfig` wants its loads kept even.

    Raises ConfigError for a balance that it has no room for.
    """
    router: Any = block.gate
    biased = BIAS in router._buffers
    balance = moe.balance or ("bias" if biased else "sequence")
    if balance == "bias" and not biased:
        raise ConfigError(
            f"moe.balance: {type(block).__name__} has no bias to move\n    -> moe.balance=sequence, or batch, or none"
        )
    return Routing(
        experts=len(router.weight),
        top_k=router.top_k,
        gate=FAMILIES[type(block).__name__].gate(router),
        groups=getattr(router, "num_group", None) or 1,
        group_top_k=getattr(router, "topk_group", None) or 1,
        scale=getattr(router, "routed_scaling_factor", 1.0),
        balance=balance,
        aux_weight=moe.aux_weight,
        z_weight=moe.z_weight,
        bias_rate=moe.bias_rate,
        capacity=moe.capacity,
        drop=moe.drop,
    )


class TakenExperts(Experts):
    """down(act(gate(x)) * up(x)) with matrices [E, out, in], as transformers stacks them."""

    partita_inner: ClassVar = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, theirs: Any) -> None:
        super().__init__(theirs.num_experts)
        for name in FORMS:
            self.register_parameter(name, theirs._parameters[name])
        self.act_fn: Callable[[Tensor], Tensor] = theirs.act_fn
        self.silu = theirs.config.hidden_act == "silu"
        self.declare()

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """x [n, C] sorted by expert, int64 sizes [E] -> [n, C]."""
        both = grouped_matmul(x, self.gate_up_proj.transpose(1, 2), sizes)
        gate, up = both.chunk(2, dim=-1)
        inner = swiglu_halves(both) if self.silu else self.act_fn(gate) * up
        return grouped_matmul(inner, self.down_proj.transpose(1, 2), sizes)


class TakenLayer(ExpertLayer):
    """A layer with the router, the experts and what stands beside them of a layer of transformers, under the same names."""

    def __init__(self, theirs: Any, routing: Routing) -> None:
        super().__init__(routing)
        self.gate = theirs.gate
        self.experts = TakenExperts(theirs.experts)
        for name, child in theirs.named_children():
            if name not in ("gate", "experts"):
                self.add_module(name, child)

    def router_weight(self) -> Tensor:
        """See `ExpertLayer`."""
        return self.gate.weight  # type: ignore[return-value]

    def choice_bias(self) -> Tensor | None:
        """See `ExpertLayer`."""
        return self.gate._buffers.get(BIAS)

    def companion(self, flat: Tensor) -> Tensor | None:
        """Shared experts; those of Qwen2 have a gate of their own."""
        several, one = self._modules.get("shared_experts"), self._modules.get("shared_expert")
        if several is not None:
            return several(flat)  # type: ignore[no-any-return]
        if one is None:
            return None
        return self._modules["shared_expert_gate"](flat).sigmoid() * one(flat)  # type: ignore[misc, no-any-return]
