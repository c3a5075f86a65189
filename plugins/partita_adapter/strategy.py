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
BASES = ("whole", "int8", "nf4")


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
def partita_transforms(plan: Plan) -> list[Transform]:
    """Transform `adapter`: where matrices have been cut, their forward is another one, and adapters are put back beside it."""
    if plan.layout.tensor == 1:
        return []

    def apply(model: nn.Module, run: Any) -> nn.Module:
        from partita_adapter.layers import adapt_again

        adapt_again(model, run.mesh.group(("tensor",)))
        return model

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
    problems = _check_base(plan, draft) + _check_cuts(plan, draft)
    moe = getattr(draft.config, "moe", None)
    if moe is not None and moe.name != "none":
        problems.append(Problem("adapter.name", "adapters beside experts are not in this version.", "Set moe.name=none."))
    return problems


def _check_base(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """What a quantised base can't be combined with."""
    base = draft.config.adapter.base
    if base not in BASES:
        return [Problem("adapter.base", f"{base!r} is no way to hold a matrix.", did_you_mean(base, BASES).capitalize())]
    if base == "whole":
        return []
    from partita_adapter.quantized import format_of

    problems = []
    if plan.layout.tensor > 1:
        reason = f"the scales of {base} belong to blocks of rows, which {plan.layout.tensor} ranks would cut."
        problems.append(
            Problem("parallel.tensor", reason, "Set parallel.tensor=1 (zero.stage=3 cuts the base), or adapter.base=whole.")
        )
    wire = plan.collectives.parameter_gather.format
    if wire != "native":
        reason = f"weights travel as {wire}, and the codes of a quantised base are no numbers."
        problems.append(
            Problem("adapter.base", reason, "Set adapter.base=whole, or gather weights as they are (compression=none).")
        )
    held = {str(found[1]).removeprefix("torch.") for p in draft.model.parameters if (found := format_of(p.name)) is not None}
    if held - {plan.precision.compute}:
        reason = f"it is held in {', '.join(held)}, and weights are {plan.precision.compute}."
        problems.append(Problem("adapter.base", reason, "Name the precision in the config (precision.compute)."))
    return problems


def _check_cuts(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Adapters that can't follow their layer to where it is cut."""
    a, problems = draft.config.adapter, []
    if a.dora and plan.layout.tensor > 1 and plan.layout.spread_kv:
        reason = "ranks that share a head would train the lengths of its rows together."
        problems.append(Problem("adapter.dora", reason, "Set parallel.replicate_kv=false, or adapter.dora=false."))
    if plan.layout.pipeline > 1 and (a.dora or a.others):
        from partita_adapter.weights import piece_of

        outside = [p.layer for s in draft.model.parameters if s.unit == draft.model.root and (p := piece_of(s.name)) is not None]
        if outside:
            reason = f"{outside[0]!r} stands in no block, and it is not known which stage needs what DoRA and `others` put there."
            problems.append(Problem("adapter.targets", reason, "Leave it out, or set parallel.pipeline=1."))
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
    from partita_adapter.files import split, turned_layers, unpack_base
    from partita_adapter.layers import DEFAULT, PIECES, merged, scale

    layers, names = split(weights, DEFAULT)
    turned = turned_layers(config, list(layers))
    unpack_base(weights, turned)
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
