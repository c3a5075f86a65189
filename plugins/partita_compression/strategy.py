"""Decides section `collectives`, and checks that what it asks of the wire can be had."""

from __future__ import annotations

from importlib import import_module
from math import prod
from typing import Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import AXES, GRADIENT_AXES, Collectives, Plan, Wire
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Cost
from partita_compression.auto import packing
from partita_compression.checks import check, ruled
from partita_compression.config import CompressionConfig, LocalConfig
from partita_compression.local_plan import decide_local
from partita_compression.names import ALGORITHMS, ALIASES, BLOCKS, FORMATS, INTEGERS, LEVELS, NEEDS_FEEDBACK, RULES, SIZES
from partita_compression.settings import EXTENSION, Local, Settings, Traffic


@hookimpl
def partita_config() -> ConfigContribution:
    """Nodes `compression` and `local`, section `collectives`."""
    return ConfigContribution(nodes={"compression": CompressionConfig, "local": LocalConfig}, sections=("collectives",))


@hookimpl
def partita_provide(slot: str, name: str) -> object | None:
    """Slot `collective`, name `compressed`, and the update rules of `RULES`."""
    if slot == "optimizer" and name in RULES:
        return getattr(import_module(f"partita_compression.rules.{RULES[name]}"), f"make_{name}")
    if (slot, name) != ("collective", "compressed"):
        return None
    from partita_compression.provider import make_compressed

    return make_compressed


@hookimpl
def partita_slots() -> dict[str, tuple[str, ...]]:
    """What `partita_provide` can give."""
    return {"collective": ("compressed",), "optimizer": tuple(RULES)}


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """A wire for each purpose. What is never sent stays native, and the manifest says so."""
    config, precision = draft.config.compression, draft.get("precision")
    layout, placement = draft.get("layout"), draft.get("placement")
    sent = layout.size(GRADIENT_AXES) > 1
    reduce = _format(draft, "gradient_reduce", config.gradient_reduce, precision.reduce, sent)
    cut = layout.size(placement.optimizer) > 1
    gather = _format(draft, "parameter_gather", config.parameter_gather, precision.compute, cut)
    dispatch = _format(draft, "expert_dispatch", config.expert_dispatch, precision.compute, layout.expert > 1)
    traffic = _traffic(draft, reduce)
    if traffic and sent and reduce == "native":
        reduce = "onebit"
        draft.effect("compression.gradient_reduce", "native", reduce, f"{ruled(draft)} sends few bits")
    node = config.node_ranks or draft.cluster.devices_per_node
    algorithm = _algorithm(draft, node)
    local = decide_local(draft)
    packed = local is not None or bool(traffic) or reduce in BLOCKS or gather != "native" or algorithm == "hierarchical"
    wires = {
        "gradient_reduce": Wire(algorithm, reduce, _size(draft, reduce)),
        "parameter_gather": Wire(algorithm, gather, _size(draft, gather)),
        "expert_dispatch": Wire(format=dispatch, size=SIZES.get(dispatch)),
    }
    draft.write("collectives", Collectives(**wires, provider="compressed" if packed else "default"))
    feedback, warmup = _feedback(draft, reduce, bool(traffic)), _warmup(draft, reduce, bool(traffic))
    average, reset, stochastic = _errors(draft, reduce, feedback)
    if packed:
        settings = Settings(
            warmup=warmup, feedback=feedback, slow_only=config.levels == "slow", node_ranks=node, traffic=traffic,
            rank=config.rank if reduce == "powersgd" else 0, density=config.density if reduce == "topk" else 0.0, local=local,
            average=average, reset=reset, stochastic=stochastic,
        )  # fmt: skip
        draft.extend(EXTENSION, settings)


def _errors(draft: PlanDraft, format: str, feedback: bool) -> tuple[float, int, bool]:
    """Average and reset of errors, and whether rounding is stochastic."""
    config = draft.config.compression
    for key in ("error_average", "error_reset"):
        if getattr(config, key) and (not feedback or format == "powersgd"):
            draft.effect(f"compression.{key}", getattr(config, key), 0, "no errors of messages are kept")
    stochastic = config.rounding == "stochastic"
    if stochastic and format not in INTEGERS:
        draft.effect("compression.rounding", "stochastic", "nearest", f"gradients travel as {format}, not as integers")
    return config.error_average, config.error_reset, stochastic and format in INTEGERS


def _size(draft: PlanDraft, format: str) -> float | None:
    """Bytes of an element on the wire; None: those of the dtype of that name."""
    if format == "topk":
        return 6 * draft.config.compression.density
    if format == "powersgd":
        return 4 * draft.config.compression.rank * _thinness(draft)
    return SIZES.get(format)


def _thinness(draft: PlanDraft) -> float:
    """Elements of two thin matrices of rank 1, for each element of the trained matrices."""
    shapes = [p.shape for p in draft.model.parameters if p.trainable and len(p.shape) > 1]
    numel = [(s[0], prod(s[1:])) for s in shapes]
    return sum(a + b for a, b in numel) / max(1, sum(a * b for a, b in numel))


def _traffic(draft: PlanDraft, format: str) -> tuple[Traffic, ...]:
    """What each update rule wants of the wire; empty where none wants anything. The others' gradients stay native unless a format was asked for."""
    wanted: list[Traffic | None] = [getattr(rule, "traffic", None) for rule in draft.rules]
    if not any(wanted):
        return ()
    return tuple(t or Traffic(None if format == "native" else 0) for t in wanted)


def _feedback(draft: PlanDraft, format: str, own: bool) -> bool:
    config = draft.config.compression
    if config.error_feedback and format not in BLOCKS:
        draft.effect("compression.error_feedback", True, False, f"gradients travel as {format}: nothing is packed in blocks")
    needed = format in NEEDS_FEEDBACK or own
    return format in BLOCKS and bool(needed if config.error_feedback is None else config.error_feedback)


def _warmup(draft: PlanDraft, format: str, own: bool) -> int:
    """Updates before the first one that is compressed."""
    asked = draft.config.compression.warmup
    if own or format not in BLOCKS:
        if asked:
            why = f"{ruled(draft)} says when" if own else f"gradients travel as {format} from the start"
            draft.effect("compression.warmup", asked, 0, why)
        return 0
    return round(asked * draft.config.train.steps)


def _format(draft: PlanDraft, field: str, asked: str, native: str, sent: bool) -> str:
    """The format in effect for one purpose; `native` is what travels anyway. Unknown formats are a problem, and go as native."""
    name = ALIASES.get(asked, asked)
    if name == native:
        return "native"
    key, known = f"compression.{field}", FORMATS[field]
    if name not in known:
        draft.problem(Problem(key, f"{asked!r} is no wire format for this.", did_you_mean(asked, known).capitalize()))
        return "native"
    if name != "native" and not sent:
        why = "nothing is sent: one rank holds all of it"
        if field == "parameter_gather" and draft.get("layout").size(GRADIENT_AXES) > 1:
            why = "nothing is gathered: every rank updates all weights itself"
        if field == "expert_dispatch":
            why = "no rows travel: every rank has all experts"
        draft.effect(key, asked, "native", why)
        return "native"
    return name


def _algorithm(draft: PlanDraft, node: int) -> str:
    config, layout = draft.config.compression, draft.get("layout")
    if config.algorithm not in ALGORITHMS:
        remedy = did_you_mean(config.algorithm, ALGORITHMS).capitalize()
        draft.problem(Problem("compression.algorithm", f"{config.algorithm!r} is no algorithm.", remedy))
    if config.levels not in LEVELS:
        remedy = did_you_mean(config.levels, LEVELS).capitalize()
        draft.problem(Problem("compression.levels", f"{config.levels!r} is not one of {', '.join(LEVELS)}.", remedy))
    if config.algorithm != "hierarchical":
        return "flat"
    if layout.world <= node or node < 2:
        draft.effect(
            "compression.algorithm", "hierarchical", "flat", f"{layout.world} ranks, {node} on a node: there is one level"
        )
        return "flat"
    return "hierarchical"


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """What can't be had, or would go wrong in silence."""
    return check(plan, draft)


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """Memory of what is kept between messages, and the time of packing."""
    settings, costs = plan.extensions.get(EXTENSION), packing(plan, draft)
    if settings is None:
        return costs
    layout = plan.layout
    numel = draft.model.trainable // (layout.pipeline * layout.tensor)
    if any(t.momentum is not None for t in settings.traffic):
        costs.append(Cost("optimizer", "momentum of a rank's own gradients", 4 * numel))
    if settings.local is not None:
        each = numel // layout.size(plan.placement.optimizer)
        costs.append(Cost("optimizer", "weights of the last meeting", 4 * each * (1 + (settings.local.momentum is not None))))
    if settings.feedback:
        if plan.collectives.gradient_reduce.algorithm == "hierarchical":
            numel //= settings.node_ranks
        shared = layout.size(tuple(a for a in AXES if a in GRADIENT_AXES and a not in plan.placement.optimizer))
        owner = numel // layout.size(plan.placement.optimizer) // shared if shared > 1 else 0
        costs.append(Cost("optimizer", "errors of compression", 4 * (numel + owner)))
    return costs


@hookimpl
def partita_run_start(run: Any) -> None:
    """Groups that train for themselves begin with the same weights, or go on from between two meetings."""
    local = _local(run)
    if local:
        from partita_compression.local import begin

        begin(run.engine, met=run.step % local.every == 0)


@hookimpl
def partita_step_end(run: Any, step: int) -> None:
    """They meet."""
    local = _local(run)
    if local and step % local.every == 0:
        from partita_compression.local import meet

        meet(run.engine)


def _local(run: Any) -> Local | None:
    settings = run.plan.extensions.get(EXTENSION)
    return None if settings is None else settings.local
