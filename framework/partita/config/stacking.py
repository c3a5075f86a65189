"""Composites (strategy, experiment) that choose options of other groups: two must not choose differently, none for a group that is gone.

Hydra lets the last one win without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.default_element import GroupDefault
from hydra.core.override_parser.overrides_parser import OverridesParser

from partita.config.overrides import Known
from partita.config.plain import field_types
from partita.plan.problems import Problem

COMPOSITES = ("experiment", "strategy")


def stacking_problems(texts: Sequence[str], loader: Any, known: Known) -> list[Problem]:
    """Problems of the composites that a command line appends, sweeps over them included (each job by itself)."""
    problems: list[Problem] = []
    for override in OverridesParser.create().parse_overrides(list(texts)):
        if override.key_or_group not in COMPOSITES or override.key_or_group not in known.groups or override.is_delete():
            continue
        values = override.sweep_iterator() if override.is_choice_sweep() and "glob(" not in (override.input_line or "") else [override.value()]
        for value in [] if override.is_sweep_override() and not override.is_choice_sweep() else values:
            names = [str(v) for v in (value if isinstance(value, list) else [value])]
            problems += _problems(override.key_or_group, names, loader, known)
    return list(dict.fromkeys(problems))


def _problems(group: str, names: Sequence[str], loader: Any, known: Known) -> Iterator[Problem]:
    first: dict[str, tuple[str, str]] = {}
    for name in names:
        for chosen, option in choices(f"{group}/{name}", loader):
            if chosen in known.chosen and chosen not in field_types(known.root):
                reason = f"{name!r} chooses {chosen}={option}, but the plug-in of {chosen!r} is blocked or not installed"
                yield Problem(group, reason, f"take it out of plugins.block, or leave {name!r} out")
            before = first.setdefault(chosen, (name, option))
            if before[1] != option:
                reason = f"{before[0]!r} chooses {chosen}={before[1]} and {name!r} chooses {chosen}={option}"
                yield Problem(group, reason, f"keep one of the two, and set single keys of {chosen!r} by hand")


def choices(path: str, loader: Any) -> Iterator[tuple[str, str]]:
    """(group, option) of each `override /group: option` and `/group: option` in the defaults list of an option file."""
    result = loader.repository.load_config(path)
    for default in (result.defaults_list if result is not None else None) or ():
        if isinstance(default, GroupDefault) and default.group and isinstance(default.value, str):
            yield default.group.lstrip("/"), default.value
