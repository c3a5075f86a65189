"""Composites (strategy, experiment) choose options of other groups: no two differently, and none of a group that is gone.

Hydra would let one of them win without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.default_element import GroupDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from partita.config.overrides import Known
from partita.config.plain import field_types
from partita.plan.problems import Problem

COMPOSITES = ("experiment", "strategy")


def stacking_problems(texts: Sequence[str], loader: Any, known: Known) -> list[Problem]:
    """Problems of the composites that a command line appends. Options that the command line chooses itself are settled."""
    overrides = OverridesParser.create(loader).parse_overrides(list(texts))
    settled = {o.key_or_group for o in overrides}
    always: list[str] = []
    swept: list[list[str]] = []
    for o in overrides:
        if o.key_or_group not in COMPOSITES or o.key_or_group not in known.groups or o.is_delete():
            continue
        if not o.is_sweep_override():
            always += _paths(o.key_or_group, o.value())
        elif o.is_choice_sweep():
            swept += [_paths(o.key_or_group, value) for value in o.sweep_iterator()]
    problems = [p for paths in swept or [[]] for p in _problems([*always, *paths], settled, loader, known)]
    return list(dict.fromkeys(problems))


def _paths(group: str, value: Any) -> list[str]:
    return [f"{group}/{name}" for name in (value if isinstance(value, list) else [value]) if name is not None]


def _problems(paths: Sequence[str], settled: set[str], loader: Any, known: Known) -> Iterator[Problem]:
    first: dict[str, tuple[str, str]] = {}
    for path in paths:
        group, _, name = path.partition("/")
        for chosen, option in choices(path, loader):
            if chosen in known.chosen and chosen not in field_types(known.root):
                reason = f"{name!r} chooses {chosen}={option}, but the plug-in of {chosen!r} is blocked or not installed"
                yield Problem(group, reason, f"take it out of plugins.block, or leave {name!r} out")
            before, other = first.setdefault(chosen, (name, option))
            if other != option and chosen not in settled:
                reason = f"{before!r} chooses {chosen}={other} and {name!r} chooses {chosen}={option}"
                yield Problem(group, reason, f"leave one of them out, or say which: {chosen}={option}")


def choices(path: str, loader: Any) -> Iterator[tuple[str, str]]:
    """(group, option) of each `override /group: option` and `/group: option` in the defaults list of an option file."""
    result = loader.repository.load_config(path)
    for default in (result.defaults_list if result is not None else None) or ():
        if isinstance(default, GroupDefault) and default.group and isinstance(default.value, str):
            yield default.group.lstrip("/"), default.value


def keys_by_option(texts: Sequence[str], loader: Any) -> dict[str, str]:
    """Config key -> `group=option` of the command line that sets it, composites included; experiments give way to the others."""
    out: dict[str, str] = {}
    groups = [
        o for o in OverridesParser.create(loader).parse_overrides(list(texts)) if not o.is_delete() and not o.is_sweep_override()
    ]
    for o in sorted(groups, key=lambda o: o.key_or_group != "experiment"):
        value: Any = o.value()
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and loader.repository.config_exists(f"{o.key_or_group}/{name}"):
                out |= dict.fromkeys(_keys(f"{o.key_or_group}/{name}", loader), f"{o.key_or_group}={name}")
    return out


def _keys(path: str, loader: Any) -> Iterator[str]:
    result = loader.repository.load_config(path)
    if result is None:
        return
    whole = result.header.get("package") == "_global_"
    prefix = "" if whole else path.partition("/")[0] + "."
    yield from (prefix + key for key in _leaves(OmegaConf.to_container(result.config, resolve=False)))
    for group, option in choices(path, loader):
        yield from _keys(f"{group}/{option}", loader)


def _leaves(node: Any, prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
