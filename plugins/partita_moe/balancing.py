"""Once an update: loads of all ranks, the balancing bias, and the figures of the update."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from partita_moe.change import moe_layers
from partita_moe.layer import MoeLayer
from partita_moe.routing import evened, worst_violation


def after_backward(run: Any) -> None:
    """Collective over the data axes and the ranks that read other tokens; ranks of a pipeline have other layers."""
    layers = [layer for _, layer in moe_layers(run.model)]
    if not layers:
        return
    sequence_parallel = run.plan.layout.sequence_parallel
    group = run.mesh.group(("replicate", "shard", "context") + (("tensor",) if sequence_parallel else ()))
    counts = _gathered(layers, group)
    for layer, count in zip(layers, counts[:, :-3], strict=True):
        if layer.routing.balance == "bias":
            layer.bias.copy_(evened(layer.bias, count.to(layer.bias.dtype), layer.routing.bias_rate))
    routed = counts[:, :-3]
    dropped, auxiliary, entropy = counts[:, -3].sum(), counts[:, -2].mean() / group.size, counts[:, -1].mean() / group.size
    run.gauges |= {
        "moe_max_violation": worst_violation(routed),
        "moe_dropped": float(dropped / routed.sum()),
        "moe_aux_loss": float(auxiliary),
        "moe_entropy": float(entropy),
        "moe_load": [[round(float(v), 4) for v in row] for row in routed / routed.sum(-1, keepdim=True)],
    }


def _gathered(layers: list[MoeLayer], group: Any) -> torch.Tensor:
    """Rows of (tokens of each expert, dropped choices, auxiliary loss, entropy), float64, summed over ranks; forgets them here."""
    rows = []
    for layer in layers:
        assert layer.counts is not None and layer.terms is not None
        rest = torch.tensor([layer.dropped], dtype=torch.float64, device=layer.counts.device)
        rows.append(torch.cat([layer.counts.double(), rest, layer.terms.double()]))
        layer.counts, layer.dropped = None, 0
    table = torch.stack(rows)
    if group.size > 1:
        dist.all_reduce(table, group=group.process_group)
    return table
