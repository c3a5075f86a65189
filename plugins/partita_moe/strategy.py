"""Mixture of experts: a change of the model, the expert axis, what balances loads, and what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.links import message
from partita.plan.plan import EXPERT_AXES, Plan
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Cost, Transform
from partita_moe.config import MoeConfig
from partita_moe.routings import BALANCES, DROPS, ROUTINGS, TAKEN

if TYPE_CHECKING:
    from torch import nn

OFF = "none"


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `moe`."""
    return ConfigContribution(nodes={"moe": MoeConfig})


@hookimpl
def partita_architecture(config: Any) -> list[Transform]:
    """Feed-forward layers become experts. What the check will refuse is left dense, so that there is a plan to show."""
    if config.moe.name == OFF or _wrong(config.moe):
        return []
    return [Transform("moe", _add)]


def _add(model: nn.Module, config: Any) -> nn.Module:
    from partita_moe.change import add_experts  # torch is imported only where a model is made

    return add_experts(model, config)


@hookimpl
def partita_transforms(plan: Plan) -> list[Transform]:
    """Tells expert layers of the run, and shares experts out."""
    return [Transform("expert_parallel", _share)]


def _share(model: nn.Module, run: Any) -> nn.Module:
    from partita_moe.change import share_experts

    return share_experts(model, run)


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Numbers that fit no routing, and an expert axis without experts or that does not share them evenly."""
    config, layout = draft.config.moe, plan.layout
    problems = _wrong(config)
    if config.name == OFF:
        if layout.expert > 1:
            reason = f"{layout.expert} ranks would share experts, but moe.name=none makes a model without experts."
            problems.append(
                Problem("parallel.expert", reason, "Set parallel.expert=1, or choose moe=mixtral or another routing.")
            )
        changed = [k for k in vars(config) if k != "name" and getattr(config, k) != getattr(MoeConfig(), k)]
        problems += [Problem(f"moe.{k}", "is of no use with moe.name=none.", "Choose a routing: moe=mixtral.") for k in changed]
        return problems
    experts = next((p.shape[0] for p in draft.model.parameters if p.experts), config.experts)
    if layout.expert > 1 and experts % layout.expert:
        legal = [d for d in range(1, experts + 1) if experts % d == 0]
        reason = f"{experts} experts can't be shared evenly by {layout.expert} ranks."
        problems.append(Problem("parallel.expert", reason, f"Legal values: {', '.join(map(str, legal))}."))
    return problems


def _wrong(config: MoeConfig) -> list[Problem]:
    if config.name == OFF:
        return []
    if config.name == TAKEN:
        return _wrong_taken(config)
    if config.name not in ROUTINGS:
        near = did_you_mean(config.name, (OFF, TAKEN, *ROUTINGS)).capitalize()
        return [Problem("moe.name", f"{config.name!r} is no routing.", near)]
    problems = []

    def need(holds: bool, key: str, reason: str, remedy: str) -> None:
        if not holds:
            problems.append(Problem(f"moe.{key}", reason, remedy))

    top_k = config.top_k if config.top_k is not None else ROUTINGS[config.name].top_k
    need(config.experts >= 1, "experts", f"{config.experts} experts make no layer.", "Give a count of at least 1.")
    need(1 <= top_k <= max(1, config.experts), "top_k", f"{top_k} of {config.experts} experts.", f"Use 1 to {config.experts}.")
    need(config.every >= 1, "every", f"{config.every} is no distance.", "Use 1 for every block, 2 for every other one.")
    need(config.ffn is None or config.ffn >= 1, "ffn", f"{config.ffn} is no width.", "Give a positive width, or null.")
    problems += _wrong_balance(config)
    even = config.groups >= 1 and config.experts % config.groups == 0
    need(even, "groups", f"{config.experts} experts in {config.groups} groups.", "Use a divisor of moe.experts.")
    room = even and 1 <= config.group_top_k <= config.groups and top_k <= config.experts // config.groups * config.group_top_k
    if even and config.groups > 1:
        reason = f"{config.group_top_k} of {config.groups} groups hold too few experts for {top_k} choices, or don't exist."
        need(room, "group_top_k", reason, "Raise moe.group_top_k, or lower moe.top_k.")
    shared = config.shared is None or config.shared >= 0
    need(shared, "shared", f"{config.shared} shared experts.", "Use 0 or more.")
    sigmoid = ROUTINGS[config.name].gate == "sigmoid"
    need(config.scale is None or sigmoid, "scale", f"{config.name} does not scale its gates.", "Drop it, or use moe=deepseek.")
    row = ROUTINGS[config.name]
    alike = row.gate == "softmax_chosen" and not config.shared
    reason = "dense weights would compute something else with gates that don't sum to one, or beside shared experts."
    need(config.upcycle is None or alike, "upcycle", reason, "Use moe=mixtral or moe=gshard, without moe.shared.")
    residual = ROUTINGS[config.name].residual and bool(config.shared)
    need(not residual, "shared", "the residual form has its dense half already.", "Drop moe.shared, or use another routing.")
    return problems


def _wrong_balance(config: MoeConfig) -> list[Problem]:
    problems = []
    if config.balance is not None and config.balance not in BALANCES:
        near = did_you_mean(config.balance, BALANCES).capitalize()
        problems.append(Problem("moe.balance", f"{config.balance!r} balances nothing.", near))
    if config.capacity is not None and config.capacity <= 0:
        problems.append(Problem("moe.capacity", f"{config.capacity} is no room.", "Use 1.0 or more, or null."))
    if config.drop not in DROPS:
        problems.append(Problem("moe.drop", f"{config.drop!r} drops nobody.", did_you_mean(config.drop, DROPS).capitalize()))
    elif config.drop != MoeConfig().drop and config.capacity is None:
        reason = "without moe.capacity experts have room for all, and nobody is dropped."
        problems.append(Problem("moe.drop", reason, "Set moe.capacity, e.g. 1.25, or drop the key."))
    return problems


OWN = (
    "experts",
    "top_k",
    "every",
    "ffn",
    "shared",
    "groups",
    "group_top_k",
    "scale",
    "upcycle",
)  # what a model with experts says itself


def _wrong_taken(config: MoeConfig) -> list[Problem]:
    plain = MoeConfig()
    told = [key for key in OWN if getattr(config, key) != getattr(plain, key)]
    remedy = "Drop it; the config of the model (model.options) says it."
    return [*(Problem(f"moe.{k}", f"is the model's own with moe.name={TAKEN}.", remedy) for k in told), *_wrong_balance(config)]


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """What expert layers send: rows there and back in forward, and again in backward."""
    layout = plan.layout
    if layout.expert == 1 or draft.config.moe.name == OFF or _wrong(draft.config.moe):
        return []
    from partita_moe.change import moe_layers

    itemsize = plan.collectives.expert_dispatch.size or {"float32": 4}.get(plan.precision.compute, 2)
    rows = [layer.routing.top_k * layer.router_weight().shape[1] for _, layer in moe_layers(draft.model.module)]
    tokens = plan.schedule.micro_batch * draft.config.data.sequence // layout.context
    if layout.sequence_parallel:
        tokens //= layout.tensor
    # there and back in forward and in backward, and where forward is computed again; a rank of a pipeline has its share of layers
    times = (6 if plan.activations.default == "full" else 4) * plan.schedule.micro_batches * len(rows) / layout.pipeline
    data = tokens * max(rows, default=0) * itemsize
    what = "tokens to experts and back"
    return [message(draft.cluster, layout, EXPERT_AXES, what, data, "exchange", times=times, repeated=True)]


@hookimpl
def partita_export(config: dict[str, Any], weights: dict[str, Any]) -> Any:
    """The translator of a model with experts; a dense model, and one that had its experts before, has its own."""
    if config.get("moe", {}).get("name", OFF) in (OFF, TAKEN):
        return None
    from partita_moe.export import translator

    return translator(config)


# ------------------------------------------------------------------ while it runs


@hookimpl
def partita_gradients_ready(run: Any, step: int) -> None:
    """Sum the loads over all ranks, move the balancing bias, and add loads to the update's metrics."""
    from partita_moe.balancing import after_backward

    after_backward(run)


@hookimpl
def partita_run_end(run: Any, summary: dict[str, Any]) -> None:
    """On rank 0, draw the loads of the whole run, resumed parts of it included."""
    if run.rank or run.config.moe.name == OFF:
        return
    from partita_moe.picture import draw_loads

    picture = draw_loads(run.dir)
    if picture is not None:
        run.pictures["moe_load"] = picture
