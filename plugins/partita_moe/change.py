"""Turns feed-forward layers of the reference models into experts, or takes over those of other models, and shares experts out over ranks."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from partita.errors import ConfigError
from partita.models.common import Mlp
from partita.models.llama import SwiGlu
from partita.plan.parts import expert_part
from partita.plan.plan import EXPERT_AXES
from partita.plan.styles import AXIS, INNER
from partita.runtime.mesh import Group
from partita.state.parts import Part, declare, declared
from partita_moe.checks import CUT
from partita_moe.experts import Experts, GeluExperts, SwiGluExperts
from partita_moe.jitter import bring_noise
from partita_moe.layer import ExpertLayer, MoeLayer
from partita_moe.packing import PACKINGS
from partita_moe.routings import TAKEN, routing_of
from partita_moe.spread import Spread


def add_experts(model: nn.Module, config: Any) -> nn.Module:
    """Every `moe.every`-th block's `mlp` becomes a MoeLayer. Raises ConfigError for a model whose layers are not known."""
    if config.moe.name == TAKEN:
        from partita_moe.takeover import take_over

        model = take_over(model, config.moe)
    else:
        _make_experts(model, config)
    if config.moe.tensor == CUT:
        _declare_cuts(model)
    return model


def _make_experts(model: nn.Module, config: Any) -> None:
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


def _declare_cuts(model: nn.Module) -> None:
    """Add experts, and ours that every token sees, to what the model says of cuts over the tensor axis; if it says nothing, nothing can be cut."""
    plan: Any = getattr(model, "partita_tensor_plan", dict)
    cuts: dict[str, str] = {}
    for name, layer in moe_layers(model):
        path = re.sub(r"\.\d+\.", ".*.", name)
        cuts[f"{path}.experts"] = INNER
        dense = getattr(layer, "dense", None)
        if isinstance(dense, SwiGlu):
            cuts |= {
                f"{path}.dense.gate_up": f"packed:{dense.down.in_features},{dense.down.in_features}",
                f"{path}.dense.down": "rowwise",
            }
        elif isinstance(dense, Mlp):
            cuts |= {f"{path}.dense.up": "colwise", f"{path}.dense.down": "rowwise"}
    model.partita_tensor_plan = lambda: {**own, **cuts} if (own := plan()) else {}  # type: ignore[assignment]


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
    spread = Spread(run.mesh.group(AXIS), layout.sequence_parallel)
    if spread.sequence:
        run.view.switches.append(spread.wholly)
    for _, layer in moe_layers(model):
        layer.term_weight = lambda: run.engine.share * run.engine.scaler.value
        layer.counting = lambda: not run.engine.recomputing
        layer.group = group
        layer.pieces = pieces if pieces.size > 1 else None
        layer.packing = PACKINGS.get(run.plan.collectives.expert_dispatch.format)
        if _are_cut(layer.experts):
            layer.spread, layer.experts.adds_whole = spread, spread.group.rank == 0
        if group is not None:
            _keep_own(layer.experts, group)
    return model


def _are_cut(experts: Experts) -> bool:
    """Whether the tensor axis has cut their matrices."""
    return any(part is not None and part.axes for part in (declared(experts, name) for name in experts.partita_experts))


def _keep_own(experts: Experts, group: Group) -> None:
    """Leave this rank its share of the experts."""
    for name in experts.partita_experts:
        old = experts._parameters[name]
        assert old is not None
        part = expert_part(declared(experts, name) or Part(tuple(old.shape)), group.rank, group.size)
        (mine,) = dict(part.cuts)[0]
        local = old.new_empty(part.local) if old.is_meta else old.detach()[slice(*mine)].clone()
        experts._parameters[name] = nn.Parameter(local, requires_grad=old.requires_grad)
        declare(experts, name, part)


def moe_layers(model: nn.Module) -> list[tuple[str, ExpertLayer]]:
    """All expert layers of a model by name."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, ExpertLayer)]
