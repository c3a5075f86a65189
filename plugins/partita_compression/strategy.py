"""Decides section `collectives`, and checks that what it asks of the wire can be had."""

from __future__ import annotations

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import AXES, GRADIENT_AXES, Collectives, Plan, Wire
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Cost
from partita_compression.config import CompressionConfig
from partita_compression.settings import EXTENSION, Settings

CASTS = ("native", "bfloat16", "float16")  # the built-in collectives do these
BLOCKS = ("int8", "int4", "fp8", "onebit")
FORMATS = {"gradient_reduce": (*CASTS, *BLOCKS), "parameter_gather": ("native", "int8", "fp8")}
NEEDS_FEEDBACK = ("onebit",)
ALIASES = {"none": "native", "bf16": "bfloat16", "fp16": "float16"}
ALGORITHMS = ("flat", "hierarchical")
LEVELS = ("all", "slow")


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `compression`, section `collectives`."""
    return ConfigContribution(nodes={"compression": CompressionConfig}, sections=("collectives",))


@hookimpl
def partita_provide(slot: str, name: str) -> object | None:
    """Slot `collective`, name `compressed`."""
    if (slot, name) != ("collective", "compressed"):
        return None
    from partita_compression.provider import make_compressed

    return make_compressed


@hookimpl
def partita_slots() -> dict[str, tuple[str, ...]]:
    """What `partita_provide` can give."""
    return {"collective": ("compressed",)}


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """A wire for each purpose. What is never sent stays native, and the manifest says so."""
    config, precision = draft.config.compression, draft.get("precision")
    layout, placement = draft.get("layout"), draft.get("placement")
    sent = layout.size(GRADIENT_AXES) > 1
    reduce = _format(draft, "gradient_reduce", config.gradient_reduce, precision.reduce, sent)
    cut = layout.size(placement.parameters) > 1
    gather = _format(draft, "parameter_gather", config.parameter_gather, precision.compute, cut)
    node = config.node_ranks or draft.cluster.devices_per_node
    algorithm = _algorithm(draft, node)
    packed = reduce in BLOCKS or gather in BLOCKS or algorithm == "hierarchical"
    feedback = reduce in NEEDS_FEEDBACK if config.error_feedback is None else config.error_feedback
    if config.error_feedback and reduce not in BLOCKS:
        draft.effect("compression.error_feedback", True, False, f"gradients travel as {reduce}: nothing is packed in blocks")
    warmup = round(config.warmup * draft.config.train.steps) if reduce in BLOCKS else 0
    if config.warmup and reduce not in BLOCKS:
        draft.effect("compression.warmup", config.warmup, 0, f"gradients travel as {reduce} from the start")
    wires = {"gradient_reduce": Wire(algorithm, reduce), "parameter_gather": Wire(algorithm, gather)}
    draft.write("collectives", Collectives(**wires, provider="compressed" if packed else "default", log=config.log))
    if packed:
        slow = config.levels == "slow"
        draft.extend(EXTENSION, Settings(warmup, bool(feedback) and reduce in BLOCKS, slow, node))


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
        if field == "parameter_gather" and draft.get("layout").size(draft.get("placement").optimizer) > 1:
            why = "the gathered weights are the stored ones, which must stay exact; zero.stage=3 keeps exact shards beside them"
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
    problems = []
    if wire.format == "float16" and plan.precision.compute != "float16" and not scaled:
        reason = "gradients in float16 on the wire overflow above 65504, and no loss scale would notice (compute is not float16)."
        remedy = "Use compression.gradient_reduce=bfloat16, or precision.loss_scale.enabled=true."
        problems.append(Problem("compression.gradient_reduce", reason, remedy))
    settings = plan.extensions.get(EXTENSION)
    if settings is not None and settings.feedback and scaled:
        reason = "errors are kept in units of the loss scale, which changes from step to step."
        problems.append(
            Problem("compression.error_feedback", reason, "Use precision=bf16 or fp32, or compression.error_feedback=false.")
        )
    if wire.format in NEEDS_FEEDBACK and config.error_feedback is False:
        reason = f"{wire.format} loses most of each message; without error feedback training does not converge."
        problems.append(Problem("compression.error_feedback", reason, "Leave it out, or use compression.gradient_reduce=int8."))
    if not 0 <= config.warmup < 1:
        problems.append(Problem("compression.warmup", f"{config.warmup} is no share of train.steps.", "Use 0 or more, below 1."))
    if config.node_ranks is not None and config.node_ranks < 1:
        problems.append(Problem("compression.node_ranks", f"a node has no {config.node_ranks} ranks.", "Use 1 or more, or null."))
    return problems


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """Memory of the errors."""
    settings = plan.extensions.get(EXTENSION)
    if settings is None or not settings.feedback:
        return []
    layout = plan.layout
    numel = draft.model.trainable // (layout.pipeline * layout.tensor)
    if plan.collectives.gradient_reduce.algorithm == "hierarchical":
        numel //= settings.node_ranks
    shared = layout.size(tuple(a for a in AXES if a in GRADIENT_AXES and a not in plan.placement.optimizer))
    owner = numel // layout.size(plan.placement.optimizer) // shared if shared > 1 else 0
    return [Cost("optimizer", "errors of compression", 4 * (numel + owner))]
