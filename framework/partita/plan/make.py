"""From a config to a plan: inspect, decide, check, estimate. Needs no device and no process group."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from partita.errors import ConfigError
from partita.plan.check import abilities, check_capabilities, check_memory, check_rules, check_survival, tell_restarts
from partita.plan.cluster import Cluster, find_cluster
from partita.plan.draft import PlanDraft
from partita.plan.estimate import estimate_plan
from partita.plan.kept import trace
from partita.plan.manifest import Manifest, make_manifest
from partita.plan.model_spec import ModelSpec, inspect_model
from partita.plan.plan import SECTIONS, Plan
from partita.plan.problems import Problem, render
from partita.plan.solve import Choice, choose
from partita.plan.solve.options import fresh
from partita.plugin.types import Cost
from partita.state.optimizers import rule_names
from partita.train.kernels import check_kernels


@dataclass
class Planned:
    """A plan with what is known about it. problems: all of them; a plan with problems can be shown, not run.

    choice: what the planner filled in, where the config left something to it.
    """

    plan: Plan
    draft: PlanDraft
    manifest: Manifest
    costs: list[Cost]
    problems: list[Problem]
    choice: Choice | None = None

    @property
    def config(self) -> Any:
        """The config that is planned: with values in place of each `auto` that the planner filled in."""
        return self.draft.config

    @property
    def model(self) -> ModelSpec:
        """The model that was planned for."""
        return self.draft.model

    @property
    def cluster(self) -> Cluster:
        """The machine that was planned for."""
        return self.draft.cluster

    def raise_problems(self) -> None:
        """ConfigError with all problems, if there are any."""
        if self.problems:
            raise ConfigError(render(self.problems))

    def save(self, folder: Path) -> None:
        """Write plan.yaml and manifest.yaml, each complete or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "plan.yaml", {**plan_dict(self.plan), "costs": [asdict(c) for c in self.costs]})
        _write(folder / "manifest.yaml", self.manifest.as_list())


def make_plan(config: Any, registry: Any, choice: Choice | None = None, module: torch.nn.Module | None = None) -> Planned:
    """Plan the run of `config` (plain dataclasses) with the strategies of `registry`.

    choice: what keys on `auto` come to; default: the planner chooses where any needs it. module: the model, where the caller brings
    its own; default: the slot `model` builds it.

    Problems are collected, not raised. Raises ConfigError where no plan can be shown (an unknown device, a model that can't be
    built), and PluginError for a name that no plug-in provides.
    """
    cluster = find_cluster(config.cluster, config.launch)
    model = inspect_model(build_on_meta(config, registry) if module is None else module)
    rules = [registry.provide("optimizer", name)(config.optimizer) for name in rule_names(config.optimizer)]
    draft = PlanDraft(config, model, cluster, registry.section_owners(), rules=rules)
    if choice is None:
        choice = choose(draft, registry, lambda s: plan_draft(fresh(draft, s), registry)[2], wanted_trials(config))
    if choice is not None:
        found = draft.problems
        draft = fresh(draft, choice.settings)
        draft.problems = list(found)
        tell_choice(draft, config, choice)
    if cluster.described and config.cluster.device is None:
        draft.effect("cluster.device", None, cluster.device, "no device was named")
    tell_restarts(draft)
    plan, costs, problems = plan_draft(draft, registry)
    traced = trace(draft, plan)
    if traced.reason:
        draft.effect("plan.activations", "traced", "not traced", f"the model does not run on the meta device: {traced.reason}")
    return Planned(plan, draft, make_manifest(config, draft.lines), costs, problems, choice)


def wanted_trials(config: Any) -> int:
    """How many plans are to be measured before one is taken."""
    return int(getattr(getattr(config, "parallel", None), "trials", 0) or 0)


def plan_draft(draft: PlanDraft, registry: Any) -> tuple[Plan, list[Cost], list[Problem]]:
    """Decide, check and estimate: (plan, costs, problems)."""
    registry.decide(draft)
    plan = draft.freeze()
    problems = [
        *draft.problems,
        *registry.check(plan, draft),
        *check_capabilities(plan, abilities(registry)),
        *check_rules(plan, draft),
        *check_survival(draft),
    ]
    problems += check_kernels(draft.config, registry, draft.cluster.accelerator)
    costs = estimate_plan(draft, plan, registry.estimate(plan, draft))
    problems += check_memory(plan, draft, costs)
    return plan, costs, list(dict.fromkeys(problems))


def tell_choice(draft: PlanDraft, config: Any, choice: Choice) -> None:
    """A manifest line for each key that the planner filled in."""
    for key, value in choice.settings.items():
        draft.effect(key, _value(config, key), value, choice.reason)


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def build_on_meta(config: Any, registry: Any) -> torch.nn.Module:
    """The model without memory. Sizes that the builder refuses become a ConfigError that names the node."""
    from partita.data.tokenizer import stated_size, vocab_size

    vocab = vocab_size(config, stated_size(config, registry))
    try:
        module: torch.nn.Module = registry.build_model(config, vocab)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"model: {config.model.name!r} can't be built: {error}\n    -> Change the sizes under model.*."
        ) from error
    return module.train()


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Plain values of all sections and extensions, for YAML and trackers."""
    sections = {name: _plain(asdict(getattr(plan, name))) for name in SECTIONS}
    return {**sections, "extensions": _plain(dict(plan.extensions))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(yaml.safe_dump(_plain(value), sort_keys=False))
    os.replace(partial, path)
