"""Turns feed-forward layers of the reference models into experts, or takes over those of other models, and shares experts out over ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from partita.errors import ConfigError
from partita.models.common import Mlp
from partita.models.llama import SwiGlu
from partita.plan.parts import expert_part
from partita.plan.plan import EXPERT_AXES
from partita.state.parts import declare, declared
from partita_moe.experts import Experts, GeluExperts, SwiGluExperts
from partita_moe.jitter import bring_noise
from partita_moe.layer import ExpertLayer, MoeLayer
from partita_moe.packing import PACKINGS
from partita_moe.routings import TAKEN, routing_of


def add_experts(model: nn.Module, config: Any) -> nn.Module:
    """Every `moe.every`-th block's `mlp` becomes a MoeLayer. Raises ConfigError for a model whose layers are not known."""
    if config.moe.name == TAKEN:
        from partita_moe.takeover import take_over

        return take_over(model, config.moe)
    moe, routing = config.moe, routing_of(config.moe)
    found = 0
    layers: list[tuple[int, MoeLayer]] = []
    units: Any = getattr(model, "partita_units", list)
    blocks = [block for _, block in units()]
    for i, block in enumerate(blocks):
        dense = getattr(block, "mlp", None)
        if not isinstance(dense, Mlp | SwiGlu):
            continue
        found += 1
        if (i + 1) % moe.every == 0:
            before = sum(p.numel() for p in dense.parameters() if p.ndim > 1)
            block.mlp = layer = _layer(dense, routing, moe.ffn)
            layer.block = i
            if routing.jitter:
                bring_noise(block, layer)
            layers.append((before, layer))
    if not found:
        raise ConfigError(
            f"moe.name: {type(model).__name__} has no feed-forward layers that are known to become experts\n"
            f"    -> use model=gpt, llama or bert, or moe=none; moe={TAKEN} runs the experts that a Hugging Face model has"
        )
    if routing.jitter:
        model.partita_noise = True  # type: ignore[assignment]
    if moe.upcycle is not None:
        from partita_moe.upcycle import Upcycled

        model.partita_weights = Upcycled(model, moe.upcycle, config.seed)  # type: ignore[assignment]
    dense_weights: Any = getattr(model, "matrix_weights", None)
    if dense_weights is not None:
        _count_active(model, dense_weights(), layers)
    return model


def _layer(dense: Mlp | SwiGlu, routing: Any, ffn: int | None) -> MoeLayer:
    width = dense.down.out_features
    inner = ffn or dense.down.in_features
    experts: Experts
    if isinstance(dense, Mlp):
        experts = GeluExperts(routing.experts, width, inner, dense.approximate)
    else:
        experts = SwiGluExperts(routing.experts, width, inner)
    beside: nn.Module | None = None
    if routing.residual:
        beside = dense
    elif routing.shared:
        inner *= routing.shared
        beside = Mlp(width, inner, dense.approximate) if isinstance(dense, Mlp) else SwiGlu(width, inner)
    return MoeLayer(width, experts, routing, beside)


def _count_active(model: nn.Module, dense_weights: int, layers: list[tuple[int, MoeLayer]]) -> None:
    """Weights that a token is multiplied with: of the experts only those it is sent to. layers: (weights of the dense layer, its heir)."""
    total = dense_weights
    for before, layer in layers:
        experts = sum(p.numel() for p in layer.experts.parameters() if p.ndim == 3) // layer.routing.experts
        beside = sum(p.numel() for p in layer.dense.parameters() if p.ndim > 1) if layer.dense is not None else 0
        total += layer.routing.top_k * experts + beside + layer.router.numel() - before
    model.matrix_weights = lambda: total  # type: ignore[assignment]


def share_experts(model: nn.Module, run: Any) -> nn.Module:
    """Tell the layers what they need of the run, and leave this rank its experts of each."""
    layout = run.plan.layout
    group = run.mesh.group(EXPERT_AXES) if layout.expert > 1 else None
    pieces = run.mesh.group(("context", "tensor") if layout.sequence_parallel else ("context",))
    for layer in model.modules():
        if not isinstance(layer, ExpertLayer):
            continue
        layer.term_weight = lambda: run.engine.share * run.engine.scaler.value
        layer.counting = lambda: not run.engine.recomputing
        layer.group = group
        layer.pieces = pieces if pieces.size > 1 else None
        layer.packing = PACKINGS.get(run.plan.collectives.expert_dispatch.format)
        if group is None:
            continue
        for name in layer.experts.partita_experts:
            old = layer.experts._parameters[name]
            assert old is not None
            before = declared(layer.experts, name)
            part = expert_part(tuple(old.shape), group.rank, group.size, before.partial if before else ())
            local = old.new_empty(part.local) if old.is_meta else part.take(old.detach()).clone()
            layer.experts._parameters[name] = nn.Parameter(local, requires_grad=old.requires_grad)
            declare(layer.experts, name, part)
    return model


def moe_layers(model: nn.Module) -> list[tuple[str, ExpertLayer]]:
    """All expert layers of a model by name."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, ExpertLayer)]
