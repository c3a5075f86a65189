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
from partita_compression.config import CompressionConfig, LocalConfig
from partita_compression.local_plan import check_local, decide_local
from partita_compression.settings import EXTENSION, Local, Settings, Traffic

CASTS = ("native", "bfloat16", "float16")  # the built-in collectives do these
SIZES = {"int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256, "fp8": 1 + 4 / 256, "onebit": 1 / 8 + 4 / 1024}  # bytes of an element
BLOCKS = (*SIZES, "topk", "powersgd")
FORMATS = {
    "gradient_reduce": (*CASTS, *BLOCKS),
    "parameter_gather": (*CASTS, "int8", "int4", "fp8"),
    "expert_dispatch": ("native", "bfloat16", "int8", "fp8"),
}
INTEGERS = ("int8", "int4")
ROUNDINGS = ("nearest", "stochastic")
NEEDS_FEEDBACK = ("onebit", "topk", "powersgd")
ALIASES = {"none": "native", "bf16": "bfloat16", "fp16": "float16"}
ALGORITHMS = ("flat", "hierarchical")
LEVELS = ("all", "slow")
RULES = {"onebit_adam": "adam", "zero_one_adam": "adam", "onebit_lamb": "lamb"}  # update rules -> their modules


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
        draft.effect("compression.gradient_reduce", "native", reduce, f"{_ruled(draft)} sends few bits")
    node = config.node_ranks or draft.cluster.devices_per_node
    algorithm = _algorithm(draft, node)
    local = decide_local(draft)
    packed = local is not None or bool(traffic) or reduce in BLOCKS or gather != "native" or algorithm == "hierarchical"
    wires = {
        "gradient_reduce": Wire(algorithm, reduce, _size(draft, reduce)),
        "parameter_gather": Wire(algorithm, gather, _size(draft, gather)),
        "expert_dispatch": Wire(format=dispatch, size=SIZES.get(dispatch)),
    }
    draft.write("collectives", Collectives(**wires, provider="compressed" if packed else "default", log=config.log))
    feedback, warmup = _feedback(draft, reduce, bool(traffic)), _warmup(draft, reduce, bool(traffic))
    errors = _errors(draft, reduce, feedback)
    if packed:
        rank, density = config.rank if reduce == "powersgd" else 0, config.density if reduce == "topk" else 0.0
        draft.extend(
            EXTENSION,
            Settings(
                warmup, feedback, config.levels == "slow", node, traffic, rank, density, local, *_errors(draft, reduce, feedback)
            ),
        )


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


def _ruled(draft: PlanDraft) -> str:
    """The update rules that want something of the wire, in words."""
    names = dict.fromkeys([draft.config.optimizer.name, *(g.optimizer for g in draft.config.optimizer.groups)])
    return "optimizer " + " and ".join(n for n in names if n in RULES)


def _feedback(draft: PlanDraft, format: str, ruled: bool) -> bool:
    config = draft.config.compression
    if config.error_feedback and format not in BLOCKS:
        draft.effect("compression.error_feedback", True, False, f"gradients travel as {format}: nothing is packed in blocks")
    needed = format in NEEDS_FEEDBACK or ruled
    return format in BLOCKS and bool(needed if config.error_feedback is None else config.error_feedback)


def _warmup(draft: PlanDraft, format: str, ruled: bool) -> int:
    """Updates before the first one that is compressed."""
    asked = draft.config.compression.warmup
    if ruled or format not in BLOCKS:
        if asked:
            why = f"{_ruled(draft)} says when" if ruled else f"gradients travel as {format} from the start"
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
    config, wire = draft.config.compression, plan.collectives.gradient_reduce
    scaled = plan.precision.loss_scale is not None
    problems = _check_rules(plan, draft)
    if wire.format == "float16" and plan.precision.compute != "float16" and not scaled:
        reason = "gradients in float16 on the wire overflow above 65504, and no loss scale would notice (compute is not float16)."
        remedy = "Use compression.gradient_reduce=bfloat16, or precision.loss_scale.enabled=true."
        problems.append(Problem("compression.gradient_reduce", reason, remedy))
    settings = plan.extensions.get(EXTENSION)
    if settings is not None and settings.feedback and scaled and not settings.traffic:
        reason = "errors are kept in units of the loss scale, which changes from step to step."
        problems.append(
            Problem("compression.error_feedback", reason, "Use precision=bf16 or fp32, or compression.error_feedback=false.")
        )
    if (wire.format in NEEDS_FEEDBACK or (settings and settings.traffic)) and config.error_feedback is False:
        reason = f"{wire.format} loses most of each message; without error feedback training does not converge."
        problems.append(Problem("compression.error_feedback", reason, "Leave it out, or use compression.gradient_reduce=int8."))
    if config.rounding not in ROUNDINGS:
        remedy = did_you_mean(config.rounding, ROUNDINGS).capitalize()
        problems.append(Problem("compression.rounding", f"{config.rounding!r} is not one of {', '.join(ROUNDINGS)}.", remedy))
    if not 0 <= config.error_average < 1 or config.error_reset < 0:
        reason = (
            f"an average of {config.error_average} of the last error, forgotten every {config.error_reset} updates, can't be had."
        )
        problems.append(Problem("compression.error_average", reason, "Use 0 or more, below 1; error_reset: 0 or more."))
    problems += [*_check_thin(plan, draft), *check_local(plan, draft)]
    if config.pipeline_activations != "native":
        reason = "activations between stages travel in the dtype of compute, in this version."
        problems.append(Problem("compression.pipeline_activations", reason, "Leave it out; precision=bf16 halves them."))
    if not 0 <= config.warmup < 1:
        problems.append(Problem("compression.warmup", f"{config.warmup} is no share of train.steps.", "Use 0 or more, below 1."))
    if config.node_ranks is not None and config.node_ranks < 1:
        problems.append(Problem("compression.node_ranks", f"a node has no {config.node_ranks} ranks.", "Use 1 or more, or null."))
    return problems


def _check_thin(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """What PowerSGD and top-k can't do."""
    config, wire, problems = draft.config.compression, plan.collectives.gradient_reduce, []
    if config.rank < 1:
        problems.append(Problem("compression.rank", f"{config.rank} is no rank of a matrix.", "Use 1 or more."))
    if not 0 < config.density <= 1:
        problems.append(
            Problem("compression.density", f"{config.density} is no share of the elements.", "Use more than 0, at most 1.")
        )
    if wire.format != "powersgd":
        return problems
    layout, cut = plan.layout, plan.placement.optimizer
    copies = layout.size(tuple(a for a in GRADIENT_AXES if a not in cut))
    narrower = any(
        0 < layout.size(axes) < layout.size(cut) for axes in (plan.placement.parameters, plan.placement.gradients) if axes
    )
    if wire.algorithm == "hierarchical" or (layout.size(cut) > 1 and (copies > 1 or narrower)):
        reason = "powersgd sums whole matrices over all data ranks at once; here gradients are summed level by level, in parts of matrices."
        remedy = "Use compression.algorithm=flat and zero.stage 0 to 3, or another format."
        problems.append(Problem("compression.gradient_reduce", reason, remedy))
    return problems


def _check_rules(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """What update rules that say what travels can't be combined with."""
    settings = plan.extensions.get(EXTENSION)
    if settings is None or not settings.traffic:
        return []
    name, wire, problems = _ruled(draft), plan.collectives.gradient_reduce.format, []
    if plan.precision.loss_scale is not None:
        reason = f"{name} keeps errors and momentum in units of the loss scale, which changes from step to step."
        problems.append(Problem("optimizer.name", reason, "Use precision=bf16 or fp32."))
    if wire in CASTS and wire != "native":
        reason = f"{name} sends few bits with error feedback, and {wire} is a plain cast."
        problems.append(Problem("compression.gradient_reduce", reason, f"Leave it out, or use one of {', '.join(BLOCKS)}."))
    return problems


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """Memory of what is kept between messages."""
    settings = plan.extensions.get(EXTENSION)
    if settings is None:
        return []
    layout, costs = plan.layout, []
    numel = draft.model.trainable // (layout.pipeline * layout.tensor)
    if any(t.momentum is not None for t in settings.traffic):
        costs.append(Cost("optimizer", "momentum of a rank's own gradients", 4 * numel))
    if settings.feedback:
        if plan.collectives.gradient_reduce.algorithm == "hierarchical":
            numel //= settings.node_ranks
        shared = layout.size(tuple(a for a in AXES if a in GRADIENT_AXES and a not in plan.placement.optimizer))
        owner = numel // layout.size(plan.placement.optimizer) // shared if shared > 1 else 0
        costs.append(Cost("optimizer", "errors of compression", 4 * (numel + owner)))
    return costs


@hookimpl
def partita_run_start(run: Any) -> None:
    """Groups that train for themselves begin with the same weights."""
    if _local(run):
        from partita_compression.local import begin

        begin(run.engine)


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
