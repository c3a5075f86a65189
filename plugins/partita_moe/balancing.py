"""Once an update: loads of all ranks, what keeps them even, and the figures of the update."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from partita.runtime.traffic import sending_among
from partita_moe.change import moe_layers
from partita_moe.layer import FIGURES, ExpertLayer
from partita_moe.routing import evened, worst_violation

KNOWN = "partita_moe_layers"  # attribute of a run's model: see `_all_layers`


def after_backward(run: Any) -> None:
    """Collective over stages, data axes and the ranks that read other tokens; all ranks know the figures of all layers afterwards."""
    here = dict(moe_layers(run.model))
    names, experts = _all_layers(run, here)
    if not names:
        return
    table = _gathered(run, here, names, experts)
    routed, (dropped, untaken, auxiliary, entropy, tokens) = table[:, : -len(FIGURES)], table[:, -len(FIGURES) :].unbind(1)
    for name, layer in here.items():
        _keep_even(layer, routed[names.index(name)])
    run.gauges |= {
        "moe_max_violation": worst_violation(routed),
        "moe_dropped": float(dropped.sum() / routed.sum()),
        "moe_untaken": float(untaken.sum() / tokens.sum()),
        "moe_aux_loss": float((auxiliary / tokens).mean()),
        "moe_entropy": float((entropy / tokens).mean()),
        "moe_load": [[round(float(v), 4) for v in row] for row in routed / routed.sum(-1, keepdim=True)],
    }


def _keep_even(layer: ExpertLayer, counts: torch.Tensor) -> None:
    bias = layer.choice_bias()
    if layer.routing.balance == "bias" and bias is not None:
        bias.copy_(evened(bias, counts.to(bias.dtype), layer.routing.bias_rate))
    if layer.load is not None:
        layer.load.copy_(counts / counts.sum())


def _all_layers(run: Any, here: dict[str, ExpertLayer]) -> tuple[list[str], int]:
    """Names of the expert layers of all stages, in order, and their number of experts; asked for once."""
    known: tuple[list[str], int] | None = getattr(run.model, KNOWN, None)
    if known is None:
        stages: list[dict[str, int]] = [{name: layer.routing.experts for name, layer in here.items()}]
        group = run.mesh.group(("pipeline",))
        if group.size > 1:
            mine, stages = stages[0], [{} for _ in range(group.size)]
            dist.all_gather_object(stages, mine, group=group.process_group)
        found = {name: experts for stage in stages for name, experts in stage.items()}
        known = sorted(found, key=_by_number), max(found.values(), default=0)
        setattr(run.model, KNOWN, known)
    return known


def _by_number(name: str) -> list[Any]:
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


def _gathered(run: Any, here: dict[str, ExpertLayer], names: list[str], experts: int) -> torch.Tensor:
    """A row for each layer: choices of each expert and `FIGURES`, float64, summed over all ranks; forgets them here."""
    table = torch.zeros(len(names), experts + len(FIGURES), dtype=torch.float64, device=run.mesh.device)
    for name, layer in here.items():
        if layer.figures is not None:
            table[names.index(name)] = layer.figures
        layer.figures = None
    axes = ("pipeline", "replicate", "shard", "context") + (("tensor",) if run.plan.layout.sequence_parallel else ())
    group = run.mesh.group(axes)
    if group.size > 1:
        with sending_among(group, table, 2, "expert_load"):
            dist.all_reduce(table, group=group.process_group)
    return table
