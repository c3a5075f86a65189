"""The registry: which plug-ins are here, and how the core asks them. Made anew in each process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pluggy

from partita.errors import PluginError, did_you_mean
from partita.plan.plan import SECTIONS
from partita.plugin import discovery, hookspecs
from partita.plugin.checks import HOOKS, hook_problems, implemented
from partita.plugin.contributions import CORE_PACKAGE, Contributions, groups
from partita.plugin.discovery import Found
from partita.plugin.markers import API, PROJECT
from partita.plugin.ordering import sort_transforms
from partita.plugin.slots import SLOTS, is_own
from partita.plugin.types import Choices, Cost, Transform
from partita.plugin.wording import complaint

if TYPE_CHECKING:
    from partita.plan.draft import PlanDraft
    from partita.plan.plan import Plan
    from partita.plan.problems import Problem


@dataclass(frozen=True)
class PluginInfo:
    """What `partita plugins` shows of one plug-in; of a blocked one only where it comes from."""

    name: str
    distribution: str
    version: str
    entry_point: str
    location: str
    api: int | None = None
    blocked: bool = False
    hooks: tuple[str, ...] = ()
    slots: tuple[tuple[str, tuple[str, ...]], ...] = ()
    nodes: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Registry:
    """All plug-ins that are installed and not blocked. Use `Registry.load`."""

    def __init__(
        self, manager: pluggy.PluginManager, found: Sequence[Found], blocked: Sequence[str], added: Contributions
    ) -> None:
        self._manager = manager
        self._found = tuple(found)
        self._added = added
        self.blocked = tuple(sorted(set(blocked)))

    @classmethod
    def load(cls, block: Sequence[str] = (), entry_points: Iterable[EntryPoint] | None = None) -> Registry:
        """Import and register plug-ins, sorted by distribution and name; those in `block` are never imported.

        entry_points: instead of the installed ones. Raises PluginError with all problems found.
        """
        found = discovery.find(entry_points)
        _refuse([*discovery.duplicates(found), *discovery.blocking_problems(found, block)])
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        _refuse(_register(manager, [f for f in found if f.name not in block]))
        registry = cls(manager, found, block, Contributions())
        registry._collect()
        return registry

    def _collect(self) -> None:
        for plugin, value in self._each("partita_config"):
            self._added.add_config(plugin, value)
        for plugin, value in self._each("partita_slots"):
            self._added.add_slots(plugin, value)
        self._added.check_options()
        _refuse(self._added.problems)

    # -------------------------------------------------------------- what is here

    @property
    def hook(self) -> Any:
        """pluggy's relay: `registry.hook.partita_step_end(run=..., step=..., metrics=...)`."""
        return self._manager.hook

    @property
    def names(self) -> list[str]:
        """Plug-ins in use, in the order in which they are asked one by one."""
        return [f.name for f in self._found if f.name not in self.blocked]

    def nodes(self) -> dict[str, type]:
        """Config node -> schema, for all plug-ins."""
        return dict(self._added.nodes)

    def packages(self) -> list[str]:
        """Config packages of plug-ins, for Hydra's search path (`pkg://...`), each found and with YAML in it."""
        return list(self._added.package_owners)

    def section_owners(self) -> dict[str, str]:
        """Plan section -> the plug-in that writes it."""
        return dict(self._added.section_owners)

    def slots(self) -> dict[str, dict[str, str]]:
        """Slot -> name -> plug-in."""
        return {slot: dict(names) for slot, names in self._added.slots.items()}

    def has(self, hook: str) -> bool:
        """Whether any plug-in implements a hook; cheap enough to ask in each step."""
        if hook not in HOOKS:
            raise PluginError(complaint(f"there is no hook {hook!r}", f"{did_you_mean(hook, HOOKS)}"))
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def describe(self) -> list[PluginInfo]:
        """All plug-ins, blocked ones included."""
        return [self._info(f) for f in self._found]

    def _info(self, found: Found) -> PluginInfo:
        dist, name = found, found.name
        if name in self.blocked:
            return PluginInfo(name, dist.distribution, dist.version, found.entry.value, found.folder, blocked=True)
        added, plugin = self._added, self._manager.get_plugin(name)
        packages = _owned(added.package_owners, name)
        slots = ((slot, _owned(names, name)) for slot, names in added.slots.items())
        return PluginInfo(
            name,
            dist.distribution,
            dist.version,
            found.entry.value,
            _location(plugin, found.folder),
            API,
            hooks=tuple(implemented(plugin)),
            slots=tuple((slot, names) for slot, names in slots if names),
            nodes=_owned(added.node_owners, name),
            sections=_owned(added.section_owners, name),
            packages=packages,
            groups=_groups(packages, _owned(added.node_owners, name)),
        )

    # -------------------------------------------------------------- slots

    def provide(self, slot: str, name: str) -> Any:
        """The implementation that a plug-in has for a name in a slot: the one that lists it, else the first that answers.

        Raises PluginError with the names there are, when nobody answers.
        """
        owner = self._added.slots.get(slot, {}).get(name)
        if owner is not None:
            answers = [v for _, v in self._each("partita_provide", only=owner, slot=slot, name=name) if v is not None]
            if not answers:
                reason = f"plug-in {owner!r} lists {name!r} in slot {slot!r} but provides nothing"
                raise PluginError(complaint(reason, "repair its partita_provide"))
            return answers[0]
        value = self._manager.hook.partita_provide(slot=slot, name=name)
        if value is None:
            raise PluginError(self._nobody(slot, name))
        return value

    def _nobody(self, slot: str, name: str) -> str:
        known = self._added.slots.get(slot)
        if known is None:
            others = [*SLOTS, *(s for s in self._added.slots if is_own(s))]
            remedy = f"no plug-in fills it; {did_you_mean(slot, others)}" if slot not in SLOTS else "no plug-in in use fills it"
            return complaint(f"slot {slot!r} has nothing called {name!r}", f"{remedy}")
        off = f" Blocked plug-ins: {', '.join(self.blocked)}." if self.blocked else ""
        near = did_you_mean(name, known)
        listed = "" if near.startswith("available") else f" (available: {', '.join(sorted(known))})"
        return complaint(f"slot {slot!r} has nothing called {name!r}", f"{near}{listed}{off}")

    # -------------------------------------------------------------- planning

    def decide(self, draft: PlanDraft) -> None:
        """Let each plug-in write its sections: owners in the order of the plan's sections, then everyone else by name."""
        owners = self._added.section_owners
        first = {owner: i for i, section in reversed([*enumerate(SECTIONS)]) if (owner := owners.get(section))}
        for plugin in sorted(self.names, key=lambda name: (first.get(name, len(SECTIONS)), name)):
            self.decide_one(plugin, draft)

    def decide_one(self, plugin: str, draft: PlanDraft) -> None:
        """Let one plug-in write its sections."""
        draft.owner = plugin
        for _ in self._each("partita_decide", only=plugin, draft=draft):
            pass  # what it decides is in the draft
        draft.owner = ""

    def choices(self, draft: PlanDraft) -> dict[str, Choices]:
        """Plug-in -> the ways to fill in its `auto` keys, for those that have any."""
        found: dict[str, Choices] = {}
        for plugin, value in self._each("partita_choices", draft=draft):
            if value is not None and not isinstance(value, Choices):
                kind = type(value).__name__
                raise PluginError(complaint(f"partita_choices of plug-in {plugin!r} returned a {kind}", "return Choices or None"))
            if value is not None and value.settings:
                found[plugin] = value
        return found

    def check(self, plan: Plan, draft: PlanDraft, only: str | None = None) -> list[Problem]:
        """Problems that plug-ins find in a finished plan; only: that plug-in alone is asked."""
        from partita.plan.problems import Problem

        return self._lists("partita_check", Problem, only, plan=plan, draft=draft)

    def estimate(self, plan: Plan, draft: PlanDraft) -> list[Cost]:
        """Costs that plug-ins add."""
        return self._lists("partita_estimate", Cost, plan=plan, draft=draft)

    def transforms(self, plan: Plan) -> list[Transform]:
        """Model transforms of all plug-ins, in the order in which they are applied."""
        return self._sorted("partita_transforms", plan=plan)

    def build_model(self, config: Any, vocab: int) -> Any:
        """The model of `config` with `vocab` tokens, on meta: what its builder makes, as changed by `partita_architecture`."""
        import torch

        with torch.device("meta"):
            return self.change_model(self.provide("model", config.model.name)(config, vocab), config)

    def change_model(self, model: Any, config: Any) -> Any:
        """The model after all changes of `partita_architecture`; on meta, or real where the caller brought it."""
        for change in self._sorted("partita_architecture", config=config):
            model = change.apply(model, config)
        return model

    def _sorted(self, hook: str, **arguments: Any) -> list[Transform]:
        transforms: list[Transform] = []
        owners: dict[str, str] = {}
        for plugin, values in self._each(hook, **arguments):
            for transform in _list_of(Transform, values, plugin, hook):
                if transform.name in owners:
                    raise PluginError(
                        f"plug-ins {owners[transform.name]!r} and {plugin!r} both have a transform {transform.name!r}\n"
                        f"    -> block one of them: plugins.block=[{plugin}]"
                    )
                owners[transform.name] = plugin
                transforms.append(transform)
        return sort_transforms(transforms, owners)

    def _lists(self, hook: str, kind: type, only: str | None = None, **arguments: Any) -> list[Any]:
        return [item for plugin, values in self._each(hook, only, **arguments) for item in _list_of(kind, values, plugin, hook)]

    def _each(self, hook: str, only: str | None = None, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """(plug-in, result) of one hook, plug-in by plug-in in the order of `names`. An error says whose it is."""
        by_name = {impl.plugin_name: impl for impl in getattr(self._manager.hook, hook).get_hookimpls()}
        for plugin in self.names if only is None else [only]:
            impl = by_name.get(plugin)
            if impl is None:
                continue
            try:
                result = impl.function(*(arguments[a] for a in impl.argnames))
            except Exception as error:
                error.add_note(f"(raised by {hook} of plug-in {plugin!r})")
                raise
            yield plugin, result


def _register(manager: pluggy.PluginManager, found: Sequence[Found]) -> list[str]:
    """Import and register; the problems of all of them."""
    problems: list[str] = []
    first: dict[int, Found] = {}
    for f in found:
        try:
            plugin = discovery.load(f)
        except PluginError as error:
            problems.append(str(error))
            continue
        if id(plugin) in first:
            problems.append(
                complaint(f"{f.label} is the same object as {first[id(plugin)].label}", "drop one of the two entry points")
            )
            continue
        first[id(plugin)] = f
        wrong = hook_problems(plugin, f.label)
        if not wrong:
            manager.register(plugin, f.name)
        problems += wrong
    return problems


def _refuse(problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise PluginError(problems[0])
    if problems:
        raise PluginError("\n".join(f"{i}. {p}" for i, p in enumerate(problems, 1)))


def _list_of(kind: type, values: Any, plugin: str, hook: str) -> list[Any]:
    if values is None:
        return []
    if not isinstance(values, list | tuple):
        raise PluginError(
            complaint(f"{hook} of plug-in {plugin!r} returned a {type(values).__name__}", f"return a list of {kind.__name__}")
        )
    for value in values:
        if not isinstance(value, kind):
            what = f"a {type(value).__name__} in its list"
            raise PluginError(complaint(f"{hook} of plug-in {plugin!r} returned {what}", f"return a list of {kind.__name__}"))
    return list(values)


def _owned(owners: dict[str, str], plugin: str) -> tuple[str, ...]:
    return tuple(name for name, owner in owners.items() if owner == plugin)


def _groups(packages: Sequence[str], nodes: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Config groups that a plug-in brings, and those that the core's own package has for its nodes."""
    core = [(group, names) for group, names in groups([CORE_PACKAGE]) if group in nodes]
    return tuple((group, tuple(names)) for group, names in sorted([*groups(packages), *core]) if group)


def _location(plugin: Any, folder: str) -> str:
    """The file that holds a plug-in's hooks."""
    import sys

    module = plugin if hasattr(plugin, "__file__") else sys.modules.get(type(plugin).__module__)
    return str(getattr(module, "__file__", None) or folder)


# Part of this room's public face: needed before there is a registry.
block_from_argv = discovery.block_from_argv
