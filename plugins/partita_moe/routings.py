"""The named routings, as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GATES = {"softmax_all", "softmax_chosen", "sigmoid"}
TAKEN = "hf"  # no row: the experts of a Hugging Face model, as it routes them
BALANCES = ("sequence", "batch", "global", "bias", "none")
DROPS = ("position", "probability")


@dataclass(frozen=True)
class Row:
    """Defaults of a routing; see `partita_moe.routing.Routing`."""

    gate: str
    top_k: int
    balance: str = "sequence"
    shared: int = 0
    residual: bool = False
    source: str = field(default="", compare=False)


ROUTINGS: dict[str, Row] = {
    "switch": Row("softmax_all", 1, source="Fedus et al. 2022, Switch Transformers"),
    # the second choice is the second best here, not drawn at random
    "gshard": Row("softmax_chosen", 2, source="Lepikhin et al. 2020, GShard, algorithm 1"),
    "mixtral": Row("softmax_chosen", 2, source="Jiang et al. 2024, Mixtral of Experts, section 2.1"),
    "deepseek": Row("sigmoid", 2, balance="bias", shared=1, source="DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2"),
    "residual": Row("softmax_all", 1, residual=True, source="Rajbhandari et al. 2022, DeepSpeed-MoE, section 4.1"),
    "expert_choice": Row("expert_choice", 2, balance="none", source="Zhou et al. 2022, Expert Choice Routing, section 3.2"),
}
CHOOSERS = {name for name, row in ROUTINGS.items() if row.gate == "expert_choice"}  # whose experts choose


def routing_of(moe: Any) -> Any:
    """The `Routing` of a `MoeConfig`."""
    from partita_moe.routing import Routing

    row = ROUTINGS[moe.name]
    return Routing(
        experts=moe.experts,
        top_k=row.top_k if moe.top_k is None else moe.top_k,
        gate=row.gate,
        groups=moe.groups,
        group_top_k=moe.group_top_k,
        scale=1.0 if moe.scale is None else moe.scale,
        balance=row.balance if moe.balance is None else moe.balance,
        aux_weight=moe.aux_weight,
        z_weight=moe.z_weight,
        bias_rate=moe.bias_rate,
        capacity=moe.capacity,
        drop=moe.drop,
        jitter=moe.jitter,
        shared=row.shared if moe.shared is None else moe.shared,
        residual=row.residual,
    )
