"""Decides section `placement`: a row of the preset table, with cells written out by hand where the user did.

Extensions of the plan: `prefetch`, units gathered ahead of the one that computes; `max_gathered`, bytes of weights that are whole at once
(None: no bound of its own).
"""

from __future__ import annotations

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import AXES, DATA_AXES, Layout, Placement, Plan
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_zero.config import ZeroConfig
from partita_zero.presets import PRESETS, STAGES

STATES = ("parameters", "gradients", "optimizer")


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `zero`, section `placement`."""
    return ConfigContribution(nodes={"zero": ZeroConfig}, sections=("placement",))


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """The placement, and in extensions how far gathers may run ahead."""
    config = draft.config.zero
    row = _row(draft, config)
    cells = {state: _cell(draft, state, getattr(config, state), getattr(row, state)) for state in STATES}
    placement = Placement(**cells)
    draft.write("placement", placement)
    draft.extend("prefetch", _prefetch(draft, placement))
    draft.extend("max_gathered", config.max_gathered if _gathers(draft, placement) else None)
    _tell(draft, placement, draft.get("layout"))


def _row(draft: PlanDraft, config: ZeroConfig) -> Placement:
    """The preset asked for; what is no preset is a problem, and the plan goes on with all states whole."""
    if config.preset is None:
        if isinstance(config.stage, int) and 0 <= config.stage < len(STAGES):
            return PRESETS[STAGES[config.stage]]
        draft.problem(Problem("zero.stage", f"there is no stage {config.stage}.", "Use a stage from 0 to 3, or auto."))
        return Placement()
    if config.preset not in PRESETS:
        remedy = did_you_mean(config.preset, PRESETS).capitalize()
        draft.problem(Problem("zero.preset", f"{config.preset!r} is no preset.", remedy))
        return Placement()
    return PRESETS[config.preset]


def _cell(draft: PlanDraft, state: str, asked: list[str] | None, preset: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that cut one state, in mesh order."""
    if asked is None:
        return preset
    strange = [axis for axis in asked if axis not in AXES]
    if strange:
        remedy = did_you_mean(strange[0], DATA_AXES).capitalize()
        draft.problem(Problem(f"zero.{state}", f"{strange[0]!r} is no axis of the mesh.", remedy))
    return tuple(axis for axis in AXES if axis in asked)


def _gathers(draft: PlanDraft, placement: Placement) -> bool:
    """Whether weights are cut in more than one part."""
    layout: Layout = draft.get("layout")
    return layout.size(placement.parameters) > 1


def _prefetch(draft: PlanDraft, placement: Placement) -> int:
    """Units gathered ahead: as asked, or fewer where max_gathered has no room for the root, the unit at work and all of those."""
    config = draft.config.zero
    if config.max_gathered is None or not _gathers(draft, placement):
        return max(0, config.prefetch)
    root, block = draft.block_bytes(draft.get("precision").compute)
    room = max(0, (config.max_gathered - root) // max(1, block) - 1)
    if config.max_gathered < root + block:
        reason = (
            f"{config.max_gathered} bytes don't hold what is used at once: {root} outside the blocks and {block} of one block."
        )
        draft.problem(Problem("zero.max_gathered", reason, f"Give at least {root + block}, or drop it."))
    if room < config.prefetch:
        draft.effect("zero.prefetch", config.prefetch, room, f"zero.max_gathered={config.max_gathered} has no room for more")
    return min(room, max(0, config.prefetch))


def _tell(draft: PlanDraft, placement: Placement, layout: Layout) -> None:
    """Manifest lines where a placement comes to less than its name promises."""
    config = draft.config.zero
    key, asked = ("zero.preset", config.preset) if config.preset else ("zero.stage", config.stage)
    if placement.optimizer and layout.size(placement.optimizer) == 1:
        draft.effect(key, asked, "all states whole", "the axes that would cut them have one rank")
    elif placement.optimizer == ("shard",) and layout.replicate == 1:
        draft.effect(
            key, asked, "one shard group of all data ranks", "parallel.replicate is 1; zero.shard_size makes groups narrower"
        )
    if placement.parameters and layout.size(placement.parameters) > 1:
        return
    if config.prefetch != ZeroConfig().prefetch:
        draft.effect("zero.prefetch", config.prefetch, 0, "no weights are gathered: they are whole on every rank")
    if config.max_gathered is not None:
        draft.effect("zero.max_gathered", config.max_gathered, None, "no weights are gathered: they are whole on every rank")


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Contradictions between the cells, and between stage and preset."""
    config, placement = draft.config.zero, plan.placement
    problems = []
    stage = config.stage if isinstance(config.stage, int) else 0
    if config.preset in PRESETS and stage and PRESETS.get(config.preset) != PRESETS[STAGES[min(max(stage, 0), 3)]]:
        reason = f"zero.preset={config.preset} and zero.stage={config.stage} are two answers to one question."
        problems.append(Problem("zero.preset", reason, "Drop one of the two."))
    for state in ("parameters", "gradients"):
        missing = [axis for axis in getattr(placement, state) if axis not in placement.optimizer]
        if missing:
            cut = list(placement.optimizer)
            reason = f"{state} are cut over {missing}, but the optimizer over {cut} only: it would have no whole shard to update."
            problems.append(Problem(f"zero.{state}", reason, f"Add {missing} to zero.optimizer, or take it out of zero.{state}."))
    problems += _narrower(plan)
    if plan.extensions.get("max_gathered") is not None and plan.layout.pipeline > 1 and plan.schedule.gather != "action":
        reason = f"a pipeline with parallel.gather={plan.schedule.gather} holds whole stages, whatever the bound."
        remedy = "Set parallel.gather=action with a schedule that doesn't split backward, or drop zero.max_gathered."
        problems.append(Problem("zero.max_gathered", reason, remedy))
    if config.prefetch < 0:
        problems.append(
            Problem(
                "zero.prefetch",
                f"{config.prefetch} units can't be gathered ahead.",
                "Use 0 (none ahead) or more; the default is 1.",
            )
        )
    return problems


def _narrower(plan: Plan) -> list[Problem]:
    """Cuts that can't lie one inside the other, and what can't be combined with cuts that do."""
    placement, mesh = plan.placement, plan.layout
    weights, gradients = set(placement.parameters), set(placement.gradients)
    if not (weights <= gradients or gradients <= weights):
        reason = f"parameters are cut over {sorted(weights)} and gradients over {sorted(gradients)}: neither cut lies inside the other."
        return [Problem("zero.gradients", reason, "Cut one of them over all axes of the other, or over none.")]
    problems = []
    for state in ("parameters", "gradients"):
        axes, place = getattr(placement, state), getattr(plan.tiers, state).place
        if axes and mesh.size(axes) < mesh.size(placement.optimizer) and place != "accelerator":
            reason = f"{state} that are cut over fewer ranks than the optimizer ({list(axes)}) stay on the accelerator, not on {place!r}."
            remedy = f"Set offload.{state}=none, or cut them over {list(placement.optimizer)}."
            problems.append(Problem(f"offload.{state}", reason, remedy))
    return problems
