"""Decides section `tiers`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Plan, Tier, Tiers
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution, Transform
from partita_offload.config import OffloadConfig

if TYPE_CHECKING:
    from torch import nn

TIERS = {"host": "partita_offload.host:HostTier", "file": "partita_offload.file:FileTier"}
STATES = ("parameters", "gradients", "optimizer", "activations")
PLACES = {"none": "accelerator", "host": "host", "file": "file"}


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `offload`, section `tiers`."""
    return ConfigContribution(nodes={"offload": OffloadConfig}, sections=("tiers",))


@hookimpl
def partita_slots() -> dict[str, Sequence[str]]:
    """Both tiers."""
    return {"tier": tuple(TIERS)}


@hookimpl
def partita_provide(slot: str, name: str) -> Any:
    """The class behind a tier."""
    if slot != "tier" or name not in TIERS:
        return None
    module, attribute = TIERS[name].split(":")
    return getattr(import_module(module), attribute)


@hookimpl
def partita_transforms(plan: Plan) -> list[Transform]:
    """Transform `offload_activations`, where they leave: outside of recompute, whose inputs then leave too."""
    tier = plan.tiers.activations
    if tier.place == "accelerator":
        return []

    def apply(model: nn.Module, context: Any) -> nn.Module:
        from partita_offload.activations import offload_activations  # torch is imported where a model is built

        return offload_activations(model, tier.fraction)

    return [Transform("offload_activations", apply, after=("recompute",), before=("compile",))]


@hookimpl
def partita_decide(draft: PlanDraft) -> None:
    """A tier for each state."""
    config = draft.config.offload
    tiers = {state: _tier(draft, state, getattr(config, state), config.fraction) for state in STATES}
    draft.write("tiers", Tiers(**tiers, path=config.path))
    if config.path and not draft.cluster.described and any(t.place == "file" for t in tiers.values()):
        _probe(draft, Path(config.path))


def _probe(draft: PlanDraft, path: Path) -> None:
    """Whether files there can be read and written past the page cache; only for a run on this machine."""
    from partita_offload.direct import existing, probe

    try:
        buffered = probe(existing(path))
    except OSError as error:
        reason = f"no file can be made in {path}: {error.strerror}."
        draft.problem(Problem("offload.path", reason, "Give a folder that this user may write to."))
        return
    if buffered:
        draft.effect("offload.path", "direct I/O", "I/O through the page cache", buffered)


def _tier(draft: PlanDraft, state: str, asked: str, fraction: float) -> Tier:
    """The tier of one state; a place nobody knows is a problem, and the state stays."""
    if asked not in PLACES:
        draft.problem(Problem(f"offload.{state}", f"{asked!r} is no place.", did_you_mean(asked, PLACES).capitalize()))
    place = PLACES.get(asked, "accelerator")
    return Tier() if place == "accelerator" or fraction == 0 else Tier(place, fraction)


@hookimpl
def partita_check(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Options that contradict each other."""
    config = draft.config.offload
    problems = []
    asked = [s for s in STATES if getattr(config, s) != "none"]
    to_file = [s for s in STATES if getattr(config, s) == "file"]
    if not 0 <= config.fraction <= 1:
        problems.append(
            Problem("offload.fraction", f"a share lies between 0 and 1, but it is {config.fraction:g}.", "The default is 1.")
        )
    if config.fraction != 1 and not asked:
        problems.append(
            Problem(
                "offload.fraction",
                "nothing is offloaded, so a share of it has no effect.",
                "Set offload.optimizer=host, or drop it.",
            )
        )
    if to_file and not config.path:
        reason = f"{', '.join(to_file)} would go to files, but no folder is given."
        problems.append(Problem("offload.path", reason, "Set offload.path to a folder on a fast local disk."))
    if config.path and not to_file:
        problems.append(
            Problem(
                "offload.path",
                "no state goes to `file`, so the folder has no effect.",
                "Drop offload.path, or set offload.optimizer=file.",
            )
        )
    problems += _room(plan, draft)
    if plan.tiers.parameters.place != "accelerator" and not plan.placement.parameters:
        reason = (
            "weights can leave only where they are released between uses, but they stay whole on every rank (zero.stage below 3)."
        )
        problems.append(Problem("offload.parameters", reason, "Set zero.stage=3, or offload.parameters=none."))
    return problems


def _room(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Whether the files of all ranks of this machine fit on its disk."""
    if draft.cluster.described or not plan.tiers.path:
        return []
    from partita.plan.memory import placed_bytes, words
    from partita_offload.direct import existing

    ranks = min(plan.layout.world, draft.cluster.devices_per_node)
    need = ranks * sum(size for (_, place), size in placed_bytes(draft, plan).items() if place == "file")
    free = shutil.disk_usage(existing(Path(plan.tiers.path))).free
    if need <= free:
        return []
    reason = f"the states of {ranks} ranks take {words(need)} there, and {words(free)} are free."
    return [Problem("offload.path", reason, "Make room, give a folder on a larger disk, or lower offload.fraction.")]
