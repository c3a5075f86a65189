"""What plug-ins add before composing: config packages, schemas, plan sections, names in slots; and who added what."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.config.schema import CORE_NODES
from partita.errors import did_you_mean
from partita.plan.plan import SECTIONS
from partita.plugin.slots import SLOTS, is_own
from partita.plugin.types import ConfigContribution
from partita.plugin.wording import complaint

CORE_PACKAGE = "partita_conf"
RESERVED = frozenset({*CORE_NODES, "seed", "deepspeed", "strategy", "hydra"})  # top-level keys that no plug-in may bring


@dataclass
class Contributions:
    """All of them, and the problems found on the way. `*_owners` map to plug-in names."""

    nodes: dict[str, type] = field(default_factory=dict)
    node_owners: dict[str, str] = field(default_factory=dict)
    package_owners: dict[str, str] = field(default_factory=dict)
    section_owners: dict[str, str] = field(default_factory=dict)
    slots: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add_config(self, plugin: str, value: Any) -> None:
        """The result of `partita_config`."""
        if value is None:
            return
        if not isinstance(value, ConfigContribution):
            self.problems.append(
                complaint(
                    f"plug-in {plugin!r}: partita_config returned a {type(value).__name__}",
                    "return a ConfigContribution, or None",
                )
            )
            return
        for name, schema in value.nodes.items():
            self._add_node(plugin, name, schema)
        for section in value.sections:
            self._add_section(plugin, section)
        for package in value.packages:
            self._add_package(plugin, package)

    def _add_node(self, plugin: str, name: str, schema: type) -> None:
        if name in RESERVED:
            self._problem(plugin, f"config node {name!r} is the core's", "give the node a name of your own")
        elif name in self.nodes:
            self._taken("config node", name, self.node_owners[name], plugin)
        elif not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
            self._problem(plugin, f"the schema of config node {name!r} is {schema!r}", "give a dataclass")
        elif missing := [f.name for f in dataclasses.fields(schema) if _has_no_default(f)]:
            self._problem(plugin, f"config node {name!r} has fields without default: {missing}", "give each a default")
        else:
            self.nodes[name], self.node_owners[name] = schema, plugin

    def _add_section(self, plugin: str, section: str) -> None:
        if section not in SECTIONS:
            self._problem(plugin, f"the plan has no section {section!r}", did_you_mean(section, SECTIONS))
        elif section in self.section_owners:
            self._taken("plan section", section, self.section_owners[section], plugin)
        else:
            self.section_owners[section] = plugin

    def _add_package(self, plugin: str, package: str) -> None:
        folder = package_folder(package)
        if package in self.package_owners:
            return
        if folder is None:
            self._problem(plugin, f"config package {package!r} can't be found", "install it, with an __init__.py at its root")
        elif not options(folder):
            self._problem(plugin, f"config package {package!r} holds no YAML file", "include *.yaml in the wheel")
        else:
            self.package_owners[package] = plugin

    def add_slots(self, plugin: str, value: Any) -> None:
        """The result of `partita_slots`."""
        if value is None:
            return
        if not isinstance(value, Mapping):
            self._problem(plugin, f"partita_slots returned a {type(value).__name__}", "return {slot: [name, ...]}")
            return
        for slot, names in value.items():
            if isinstance(names, str) or not isinstance(names, Iterable):
                self._problem(plugin, f"the names of slot {slot!r} are {names!r}", "give a list of names")
            elif slot not in SLOTS and not is_own(slot):
                remedy = f"{did_you_mean(slot, SLOTS)} A slot of your own has a dot in it: {plugin}.{slot}"
                self._problem(plugin, f"there is no slot {slot!r}", remedy)
            else:
                self._add_names(plugin, slot, list(names))

    def _add_names(self, plugin: str, slot: str, names: list[str]) -> None:
        known = self.slots.setdefault(slot, {})
        for name in names:
            if name in known:
                self._taken(f"name in slot {slot!r}:", name, known[name], plugin)
            else:
                known[name] = plugin

    def check_options(self) -> None:
        """Hydra takes the first file of a name and hides the others without a word, so two are a problem."""
        first: dict[str, str] = {}
        for package in (CORE_PACKAGE, *self.package_owners):
            folder = package_folder(package)
            for option in sorted(options(folder)) if folder else ():
                if option in first:
                    self.problems.append(
                        f"config option {option} is in two packages, {first[option]} and {package}; one would hide the other\n"
                        f"    -> rename the file in {package}, or block plug-in {self.package_owners[package]!r}"
                    )
                first.setdefault(option, package)

    def _taken(self, what: str, name: str, first: str, second: str) -> None:
        if first == second:
            self._problem(first, f"{what} {name!r} is given twice", "drop one")
            return
        self.problems.append(
            complaint(
                f"{what} {name!r} is claimed by two plug-ins, {first!r} and {second!r}",
                f"block one of them: plugins.block=[{second}]",
            )
        )

    def _problem(self, plugin: str, reason: str, remedy: str) -> None:
        self.problems.append(complaint(f"plug-in {plugin!r}: {reason}", f"{remedy}"))


def _has_no_default(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def package_folder(package: str) -> Path | None:
    """The folder of an importable package with an `__init__.py` (Hydra needs one), else None. Imports parents only."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(spec.origin).parent


def options(folder: Path) -> set[str]:
    """Config options below a folder, as `group/name`."""
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")}


def groups(packages: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(group, option names) of config packages."""
    found: dict[str, list[str]] = {}
    for package in packages:
        folder = package_folder(package)
        for option in sorted(options(folder)) if folder else ():
            group, _, name = option.rpartition("/")
            found.setdefault(group, []).append(name)
    yield from sorted(found.items())
