"""Mixture of experts: a change of the model, the expert axis, what balances loads, and what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.plan.draft import PlanDraft
from partita.plan.links import message
from partita.plan.plan import EXPERT_AXES, Plan
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Cost, Transform
from partita_moe.checks import CUT, OFF, WHOLE, looks_ahead, wrong
from partita_moe.config import MoeConfig
from partita_moe.routings import TAKEN

if TYPE_CHECKING:
    from torch import nn


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `moe`."""
    return ConfigContribution(nodes={"moe": MoeConfig})


@hookimpl
def partita_architecture(config: Any) -> list[Transform]:
    """Feed-forward layers become experts. What the check will refuse is left dense, so that there is a plan to show."""
    if config.moe.name == OFF or wrong(config.moe):
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
    problems = [*wrong(config), *looks_ahead(plan, draft)]
    if config.name == OFF:
        if layout.expert > 1:
            reason = f"{layout.expert} ranks would share experts, but moe.name=none makes a model without experts."
            problems.append(
                Problem("parallel.expert", reason, "Set parallel.expert=1, or choose moe=mixtral or another routing.")
            )
        changed = [k for k in vars(config) if k != "name" and getattr(config, k) != getattr(MoeConfig(), k)]
        problems += [Problem(f"moe.{k}", "is of no use with moe.name=none.", "Choose a routing: moe=mixtral.") for k in changed]
        return problems
    if config.tensor == CUT and layout.tensor == 1:
        draft.effect("moe.tensor", CUT, WHOLE, "parallel.tensor is 1")
    experts = next((p.shape[0] for p in draft.model.parameters if p.experts), config.experts)
    if layout.expert > 1 and experts % layout.expert:
        legal = [d for d in range(1, experts + 1) if experts % d == 0]
        reason = f"{experts} experts can't be shared evenly by {layout.expert} ranks."
        problems.append(Problem("parallel.expert", reason, f"Legal values: {', '.join(map(str, legal))}."))
    return problems


@hookimpl
def partita_estimate(plan: Plan, draft: PlanDraft) -> list[Cost]:
    """What expert layers send: rows there and back in forward, and again in backward."""
    layout = plan.layout
    if layout.expert == 1 or draft.config.moe.name == OFF or wrong(draft.config.moe):
        return []
    from partita_moe.change import moe_layers

    itemsize = plan.collectives.expert_dispatch.size or {"float32": 4}.get(plan.precision.compute, 2)
    rows = [layer.routing.top_k * layer.router_weight().shape[1] for _, layer in moe_layers(draft.model.module)]
    tokens = plan.schedule.micro_batch * draft.config.data.sequence // layout.context
    if layout.sequence_parallel and draft.config.moe.tensor == WHOLE:
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
