"""Decides section `collectives`."""

from __future__ import annotations

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Collectives, Plan, Wire
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_compression.config import CompressionConfig

FORMATS = ("native", "bfloat16", "float16", "int8", "onebit")
ALIASES = {"none": "native", "bf16": "bfloat16", "fp16": "float16"}


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `compression`, section `collectives`."""
    return ConfigContribution(nodes={"compression": CompressionConfig}, sections=("collectives",))


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """A wire format for each purpose. What is never sent stays native, and the manifest says so."""
    config = draft.config.compression
    precision = draft.get("precision")
    reduce = _format(draft, "gradient_reduce", config.gradient_reduce, precision.reduce, sent=draft.get("layout").data > 1)
    cut = draft.get("layout").size(draft.get("placement").optimizer) > 1
    gather = _format(draft, "parameter_gather", config.parameter_gather, precision.compute, sent=cut)
    draft.write("collectives", Collectives(gradient_reduce=Wire(format=reduce), parameter_gather=Wire(format=gather)))


def _format(draft: PlanDraft, field: str, asked: str, native: str, sent: bool) -> str:
    """The format in effect for one purpose; `native` is what travels anyway. Unknown formats are a problem, and go as native."""
    name = ALIASES.get(asked, asked)
    if name == native:
        return "native"
    key = f"compression.{field}"
    if name not in FORMATS:
        draft.problem(Problem(key, f"{asked!r} is no wire format.", did_you_mean(asked, FORMATS).capitalize()))
        return "native"
    if name != "native" and not sent:
        draft.effect(key, asked, "native", "nothing is sent: one rank holds all of it")
        return "native"
    return name


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """float16 on the wire overflows at 65504, which gradients reach unless a loss scale watches them."""
    scaled = plan.precision.loss_scale is not None
    if plan.collectives.gradient_reduce.format == "float16" and plan.precision.compute != "float16" and not scaled:
        reason = "gradients in float16 on the wire overflow above 65504, and no loss scale would notice (compute is not float16)."
        return [
            Problem(
                "compression.gradient_reduce",
                reason,
                "Use compression.gradient_reduce=bfloat16, or precision.loss_scale.enabled=true.",
            )
        ]
    return []
