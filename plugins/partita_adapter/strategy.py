"""Hooks: adapters become part of the model before it is planned, are saved with each checkpoint, and are merged for an export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.errors import ConfigError, did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Plan
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Transform
from partita_adapter.config import AdapterConfig

if TYPE_CHECKING:
    from torch import nn

NAMES = ("none", "lora")
CUT = ("tensor", "pipeline")  # axes that cut what adapters stand beside


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `adapter`."""
    return ConfigContribution(nodes={"adapter": AdapterConfig})


@hookimpl
def partita_architecture(config: Any) -> list[Transform]:
    """Transform `adapter`: the base is frozen, small matrices stand beside the layers that `targets` names."""
    if config.adapter.name != "lora":
        return []

    def apply(model: nn.Module, config: Any) -> nn.Module:
        from partita_adapter.build import add_adapters  # torch is imported where a model is built

        return add_adapters(model, config)

    return [Transform("adapter", apply)]


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Names and sizes, options without effect, and axes that cut the layers."""
    a = draft.config.adapter
    if a.name not in NAMES:
        return [Problem("adapter.name", f"{a.name!r} is no adapter.", did_you_mean(a.name, NAMES).capitalize())]
    default = AdapterConfig()
    if a.name == "none":
        set_ = [k for k in vars(default) if k != "name" and getattr(a, k) != getattr(default, k)]
        return [
            Problem(f"adapter.{k}", "there is no adapter, so it has no effect.", "Use +adapter=lora, or drop it.") for k in set_
        ]
    problems = []
    for axis in CUT:
        if getattr(plan.layout, axis) > 1:
            reason = f"adapters beside layers that {getattr(plan.layout, axis)} ranks share are not in this version."
            problems.append(Problem(f"parallel.{axis}", reason, f"Set parallel.{axis}=1; zero.stage=3 cuts the base, too."))
    moe = getattr(draft.config, "moe", None)
    if moe is not None and moe.name != "none":
        problems.append(Problem("adapter.name", "adapters beside experts are not in this version.", "Set moe.name=none."))
    return problems


@hookimpl
def partita_save(run: Any, step: int, path: Path) -> None:
    """The adapter in peft's format, in folder `adapter` of the run."""
    if run.config.adapter.name == "lora":
        from partita_adapter.files import save_adapter

        save_adapter(run, run.dir / "adapter")


@hookimpl
def partita_export(config: dict[str, Any], weights: dict[str, Any]) -> None:
    """Work the trained adapter into the matrices beside it; nothing of adapters is left in `weights`."""
    adapter = config.get("adapter") or {}
    if adapter.get("name") != "lora":
        return
    from partita_adapter.files import split, turned_layers
    from partita_adapter.layers import DEFAULT, PIECES, merged, scale

    layers, names = split(weights, DEFAULT)
    turned = turned_layers(config, list(layers))
    factor = scale(adapter["alpha"], adapter["rank"], adapter["rslora"])
    for layer, pieces in layers.items():
        key = f"{layer}.weight"
        if key not in weights:
            raise ConfigError(
                f"{key} is not in the checkpoint, so an adapter can't be merged into it\n"
                "    -> train with train.save_frozen=true, or load the folder `adapter` with peft"
            )
        low, high, length = (pieces.get(kind) for kind in PIECES)
        matrix = weights[key].t() if layer in turned else weights[key]
        whole = merged(matrix, low, high, length, factor)  # type: ignore[arg-type]
        weights[key] = whole.t().contiguous() if layer in turned else whole
    for name in names:
        del weights[name]
