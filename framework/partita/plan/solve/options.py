"""What there is to choose from: for each plug-in the ways to fill in its keys, and the sections that each of them comes to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from partita.plan.draft import PlanDraft
from partita.plan.plan import SECTIONS, Plan
from partita.plan.problems import Problem


def with_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """A config in which some keys (`zero.stage`) have other values. Only the nodes on their way are copied."""
    made = copy.copy(config)
    copied: set[str] = set()
    for key, value in settings.items():
        *path, last = key.split(".")
        node, where = made, ""
        for part in path:
            where += part + "."
            if where not in copied:
                setattr(node, part, copy.copy(getattr(node, part)))
                copied.add(where)
            node = getattr(node, part)
        setattr(node, last, value)
    return made


@dataclass(frozen=True)
class Option:
    """One way: the settings, and the sections and extensions that its plug-ins write because of them."""

    settings: Mapping[str, Any]
    sections: Mapping[str, Any] = field(default_factory=dict)
    extensions: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def __add__(self, other: Option) -> Option:
        return Option(
            {**self.settings, **other.settings},
            {**self.sections, **other.sections},
            {**self.extensions, **other.extensions},
            self.problems + other.problems,
        )

    def plan(self) -> Plan:
        """The plan of the sections; those that are missing have their defaults."""
        return Plan(**self.sections, extensions=MappingProxyType(dict(self.extensions)))


def fresh(draft: PlanDraft, settings: Mapping[str, Any]) -> PlanDraft:
    """An empty draft for the config with `settings`, which shares what was costly to find out."""
    return replace(
        draft, config=with_settings(draft.config, settings), owner="", sections={}, extensions={}, lines=[], problems=[]
    )


class Space:
    """All options: `wide`, those of the plug-in that lays ranks out, and `rest`, the combinations of the others'.

    ways: plug-in -> settings. base: what everyone writes with the first settings of each.
    """

    def __init__(self, draft: PlanDraft, registry: Any, ways: Mapping[str, tuple[Mapping[str, Any], ...]]) -> None:
        self.draft, self.registry = draft, registry
        first: dict[str, Any] = {}
        for settings in ways.values():
            first |= settings[0]
        self.first = first
        whole = fresh(draft, first)
        registry.decide(whole)
        self.base = Option(first, dict(whole.sections), dict(whole.extensions))
        owner = registry.section_owners().get("layout", "")
        self.wide_plugin = owner if owner in ways else ""
        self.wide = [self._decided(owner, s) for s in ways[owner]] if self.wide_plugin else [Option({})]
        self.others = {name: [self._decided(name, s) for s in settings] for name, settings in ways.items() if name != owner}

    def rest(self) -> Iterator[Option]:
        """The combinations of the other plug-ins' options."""
        for combination in product(*self.others.values()):
            whole = Option({})
            for option in combination:
                whole = whole + option
            yield whole

    def _decided(self, plugin: str, settings: Mapping[str, Any]) -> Option:
        draft = fresh(self.draft, {**self.first, **settings})
        owners = self.registry.section_owners()
        for section in SECTIONS:  # earlier sections as in the base
            if owners.get(section) == plugin:
                break
            if section in self.base.sections:
                draft.sections[section] = self.base.sections[section]
        before, known = dict(draft.sections), set(draft.extensions)
        self.registry.decide_one(plugin, draft)
        written = {name: value for name, value in draft.sections.items() if name not in before}
        added = {name: value for name, value in draft.extensions.items() if name not in known}
        return Option(settings, written, added, tuple(draft.problems))

    def checked(self, option: Option, plugins: list[str]) -> tuple[Problem, ...]:
        """Problems of an option as far as its own plug-ins see them, with all else as in the base."""
        if option.problems:
            return option.problems
        whole = self.base + option
        draft = fresh(self.draft, whole.settings)
        plan = whole.plan()
        return tuple(p for name in plugins for p in self.registry.check(plan, draft, only=name))
