"""What the core checks of every plan: that this version can carry it out, and that it fits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.estimate import MEMORY, memory_total
from partita.plan.memory import words
from partita.plan.plan import AXES, Plan, Tier
from partita.plan.problems import Problem
from partita.plugin.types import Cost
from partita.runtime.joining import joined
from partita.state.capabilities import CAPABILITIES

# Share of a device that a plan may fill by prediction: allocator, collectives and kernels want some too (5 to 10 %).
USABLE = 0.95

Capabilities = Mapping[str, frozenset[str]]


def abilities(registry: Any) -> Capabilities:
    """What the state engine can carry out, and the schedules that plug-ins have executors for."""
    return {**CAPABILITIES, "schedules": frozenset({"none", *registry.slots().get("executor", ())})}


def check_capabilities(plan: Plan, able: Capabilities) -> list[Problem]:
    """A problem for everything in the plan that this version can't carry out."""
    return [*_check_layout(plan, able), *_check_placement(plan, able), *_check_tiers(plan, able), *_check_rest(plan, able)]


def check_survival(draft: PlanDraft) -> list[Problem]:
    """What is kept for the case that a rank is lost must be of use then."""
    train, launch = draft.config.train, draft.config.launch
    if train.memory_every < 0:
        return [Problem("train.memory_every", f"{train.memory_every} is no number of steps.", "Give 0 (none) or more.")]
    if not train.memory_every or draft.cluster.described:
        return []
    if not hasattr(os, "memfd_create"):
        return [Problem("train.memory_every", "this system has no files in memory.", "Set train.memory_every=0.")]
    if joined() is None and not launch.restarts:
        what = "snapshots in memory are for restarts, and launch.restarts is 0: nothing would read them."
        return [Problem("train.memory_every", what, "Set launch.restarts, or train.memory_every=0.")]
    return []


def tell_restarts(draft: PlanDraft) -> None:
    """A manifest line where another launcher restarts ranks."""
    who, asked = joined(), draft.config.launch.restarts
    if who is not None and asked:
        why = f"the ranks were started by {who}, which alone can start them again (torchrun --max-restarts, Slurm --requeue)"
        draft.effect("launch.restarts", asked, 0, why)


def _missing(key: str, what: str, remedy: str) -> Problem:
    return Problem(key, f"{what} is not in this version.", remedy)


def _check_layout(plan: Plan, able: Capabilities) -> list[Problem]:
    names = {"pipeline": "pipeline", "context": "context", "tensor": "tensor", "expert": "expert"}
    problems = []
    for axis in (*AXES, "expert"):
        degree = getattr(plan.layout, axis)
        if degree > 1 and axis not in able["axes"]:
            what = f"{names.get(axis, axis)} parallelism ({degree} ranks)"
            problems.append(_missing(f"parallel.{axis}", what, f"Set parallel.{axis}=1; the ranks go to parallel.data."))
    if plan.schedule.name not in able["schedules"]:
        remedy = "Use " + _options(able["schedules"]) + "."
        problems.append(_missing("parallel.schedule", f"schedule {plan.schedule.name!r}", remedy))
    return problems


def _check_placement(plan: Plan, able: Capabilities) -> list[Problem]:
    problems = []
    placement = plan.placement
    for state in ("parameters", "gradients", "optimizer"):
        axes = getattr(placement, state)
        strange = [a for a in axes if a not in able["placement_axes"]]
        if strange:
            remedy = f"Use axes out of {_options(able['placement_axes'])}."
            problems.append(_missing(f"zero.{state}", f"cutting {state} over {', '.join(strange)}", remedy))
        narrower = axes and axes != placement.optimizer and plan.layout.size(axes) != plan.layout.size(placement.optimizer)
        if narrower and set(axes) <= set(placement.optimizer) and "narrower" not in able.get("placements", frozenset()):
            what = f"cutting {state} over {list(axes)} while the optimizer is cut over {list(placement.optimizer)}"
            problems.append(
                _missing(
                    f"zero.{state}", what, f"Cut both alike (zero.stage=3, zero.preset=hsdp), or not at all: zero.{state}=[]."
                )
            )
    return problems


def _check_tiers(plan: Plan, able: Capabilities) -> list[Problem]:
    problems = []
    for state in ("parameters", "gradients", "optimizer", "activations"):
        tier: Tier = getattr(plan.tiers, state)
        if tier.place not in able["activation_tiers" if state == "activations" else "tiers"]:
            what = f"keeping {state} on tier {tier.place!r}"
            other = "host, or recompute=full" if state == "activations" else "none; a higher zero.stage saves memory too"
            problems.append(_missing(f"offload.{state}", what, f"Set offload.{state}={other}."))
    return problems


def _check_rest(plan: Plan, able: Capabilities) -> list[Problem]:
    problems = []
    for name in ("master", "optimizer", "gradient"):
        dtype = getattr(plan.precision, name)
        allowed = able["optimizer_dtypes" if name == "optimizer" else "state_dtypes"]
        if dtype == "bfloat16" and dtype not in allowed:  # other names are the precision plug-in's to refuse
            remedy = f"Use {_options(allowed)}."
            problems.append(_missing(f"precision.{name}", f"{dtype} for {name} states", remedy))
    decisions = {plan.activations.default, *(d for _, d in plan.activations.units)}
    for decision in sorted(decisions - able["activations"]):
        what = f"recompute by {decision}"
        problems.append(_missing("recompute.policy", what, "Use recompute=full or recompute=selective."))
    wires = {"gradient_reduce": "wire_formats", "parameter_gather": "gather_formats", "expert_dispatch": "dispatch_formats"}
    if plan.collectives.provider != "default":
        return problems  # whoever provides them knows what it can do
    for purpose, ability in wires.items():
        wire = getattr(plan.collectives, purpose)
        key = f"compression.{purpose}"
        if wire.format not in able[ability]:
            problems.append(_missing(key, f"{wire.format!r} on the wire", f"Use {_options(able[ability])}."))
        if wire.algorithm not in able["algorithms"]:
            problems.append(_missing(key, f"the {wire.algorithm} algorithm", f"Use {_options(able['algorithms'])}."))
    return problems


def _options(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))


def check_rules(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Parameters that the update rule asked for can't update, and groups that fit none."""
    from partita.state.layout import assign_groups  # torch is imported only where a plan is made
    from partita.state.optimizers import rule_reason

    problems = _check_options(draft)
    trained: list[Any] = [p for p in draft.model.parameters if p.trainable]
    index, groups = assign_groups(trained, draft.config.optimizer)
    cut = plan.layout.tensor > 1 or plan.layout.expert > 1
    found: dict[str, list[str]] = {}
    for p in trained:
        reason = rule_reason(draft.rules[groups[index[p.name]].rule], p.shape, plan, cut and len(p.shape) > 1)
        if reason:
            found.setdefault(reason, []).append(p.name)
    remedy = "Choose another rule, or give these parameters one: optimizer.groups=[{match: [PATTERN], optimizer: adamw}]."
    return problems + [
        Problem(
            "optimizer.name", f"{reason} ({len(names)} parameters: {', '.join(names[:3])}{', ...' * (len(names) > 3)}).", remedy
        )
        for reason, names in found.items()
    ]


def _check_options(draft: PlanDraft) -> list[Problem]:
    """Options that no update rule of the run takes."""
    known = sorted({name for rule in draft.rules for name in getattr(rule, "options", ())})
    remedy = lambda name: did_you_mean(name, known).capitalize() if known else "Leave it out."  # noqa: E731
    reason = f"the update rule {draft.config.optimizer.name!r} has no such option."
    return [Problem(f"optimizer.options.{n}", reason, remedy(n)) for n in draft.config.optimizer.options if n not in known]


# ------------------------------------------------------------------ memory


def check_memory(plan: Plan, draft: PlanDraft, costs: list[Cost]) -> list[Problem]:
    """A problem where the fullest rank is predicted to need more than it has."""
    capacity = draft.cluster.capacity(plan.layout.world)
    need = memory_total(costs)
    if capacity is None or need <= capacity * USABLE:
        return []
    shares: dict[str, int] = {}
    for cost in costs:
        if cost.category in MEMORY and cost.place == "accelerator" and cost.bytes:
            shares[cost.category] = shares.get(cost.category, 0) + cost.bytes
    by_size = sorted(shares.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {words(size)}" for name, size in by_size)
    whose = draft.cluster.device if draft.cluster.accelerator else "a rank's share of this machine"
    reason = f"each rank needs {words(need)} ({parts}), and {USABLE:.0%} of {whose} is {words(capacity * USABLE)}."
    return [Problem(_memory_key(by_size[0][0]), reason, _memory_remedy(plan, by_size[0][0]))]


def _memory_key(category: str) -> str:
    return "train.micro_batch" if category == "activations" else "zero.stage"


def _memory_remedy(plan: Plan, largest: str) -> str:
    """What to change first, for the category that is largest."""
    ways = []
    if largest == "activations":
        if plan.schedule.micro_batch > 1:
            ways.append(f"train.micro_batch={max(1, plan.schedule.micro_batch // 2)}")
        if plan.activations.default == "keep":
            ways.append("recompute=full")
    if plan.layout.data > 1 and not plan.placement.parameters:
        ways.append("zero.stage=3" if plan.placement.optimizer else "zero.stage=1, 2 or 3")
    if plan.precision.compute == "float32":
        ways.append("precision=bf16")
    if plan.placement.parameters or plan.layout.data == 1:
        ways.append("more ranks with zero.stage=3")
    return "Try " + ", or ".join([*ways, "a smaller model"]) + "."
