"""Each override of a command line looked at by itself, so that all mistakes are told at once (Hydra stops at the first)."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from partita.config.messages import describe, parse_problem, several, twice
from partita.config.plain import field_types, is_union, strip_optional
from partita.config.strangers import leaves, stranger, type_at
from partita.errors import did_you_mean, nearest
from partita.plan.problems import Problem


@dataclass(frozen=True)
class Known:
    """What an override may name. groups: config group -> options. chosen: groups that the default job has a choice for."""

    root: type
    keys: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    chosen: Mapping[str, str]
    primary: bool

    @classmethod
    def of(cls, root: type, loader: Any, chosen: Mapping[str, str]) -> Known:
        """From the schema and Hydra's config loader; `chosen` is empty for a primary config of the user's own."""
        repository = loader.repository  # the loader's own methods copy all of it at each call
        names = [g for g in repository.get_group_options("", results_filter=ObjectType.GROUP) if g != "hydra"]
        groups = {g: tuple(repository.get_group_options(g, results_filter=ObjectType.CONFIG)) for g in names}
        return cls(root, tuple(leaves(root)), groups, chosen, bool(chosen))


def override_problems(texts: Sequence[str], known: Known, multirun: bool) -> tuple[list[Problem], list[str]]:
    """(problems, the overrides that have none)."""
    problems: list[Problem] = []
    right: list[str] = []
    seen: set[str] = set()
    parser = OverridesParser.create()
    custom = any(t.lstrip("+").startswith("hydra.searchpath=") for t in texts)
    for text in texts:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            problems.append(parse_problem(text, str(error)))
            continue
        found = list(_problems(override, known, seen, multirun, custom))
        problems += found
        if not found:
            right.append(text)
    return problems, right


def _problems(o: Override, known: Known, seen: set[str], multirun: bool, custom: bool) -> Iterator[Problem]:
    key = o.key_or_group
    if o.is_hydra_override() or key.split("@")[0].startswith("hydra"):
        if "/" in key and not o.is_delete() and None in _values(o):  # the rest of its own node Hydra checks
            yield Problem(key, "no option is given", f"name one, or leave out {key}")
        return
    if o.is_sweep_override() and not multirun:
        yield several(key, (o.input_line or "").partition("=")[2], maybe_list=_is_list(key, known))
        return
    if key in known.groups and o.package is None:
        yield from _group_problems(o, known, seen, custom)
    elif o.is_delete() and type_at(known.root, key) is not None:
        yield Problem(key, "a key can't be removed", f"give it another value: {key}=<value>")
    elif not custom:
        yield from _key_problems(o, known)


def _is_list(key: str, known: Known) -> bool:
    """Whether several values could be meant as a list: for a key that takes one, and for groups that are stacked."""
    return getattr(strip_optional(type_at(known.root, key)), "__origin__", None) is list or key == "strategy"


def _values(o: Override) -> list[Any]:
    """What an override gives: one value, or those of a sweep that can be counted."""
    if not o.is_sweep_override():
        return [o.value()]
    if o.value_type in (ValueType.GLOB_CHOICE_SWEEP, ValueType.INTERVAL_SWEEP):
        return []
    return [Override._convert_value(v) for v in o.sweep_iterator()]


# ------------------------------------------------------------------ groups


def _group_problems(o: Override, known: Known, seen: set[str], custom: bool) -> Iterator[Problem]:
    group, options = o.key_or_group, known.groups[o.key_or_group]
    if o.is_delete():
        if not isinstance(o.value(), str | None):
            yield Problem(f"~{group}", "a group is taken out as a whole, or with the name of its option", f"~{group}")
        return
    if group in known.chosen and group not in field_types(known.root):
        reason = "the plug-in that this group belongs to is blocked or not installed"
        yield Problem(group, reason, "take it out of plugins.block, or leave the group out; `partita plugins` lists them")
        return
    yield from _plus_problems(o, known)
    if group in seen and o.is_add():
        yield twice(group)
    seen.add(group)
    plus = "+" if o.is_add() else ""
    for value in _values(o):
        if value is None:  # Hydra would end with a traceback
            yield Problem(group, "no option is given", _options(plus + group, "", options))
            continue
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str):
                yield Problem(group, f"{name!r} is no name of an option", _options(plus + group, str(name), options))
            elif not custom and name not in options:
                yield Problem(
                    group,
                    f"there is no option {describe(name)!r} in group {group!r}",
                    _options(plus + group, str(name), options),
                )


def _options(group: str, name: str, options: Sequence[str]) -> str:
    near = nearest(name, options)
    start = f"Did you mean {' or '.join(f'{group}={n}' for n in near)}? " if near else ""
    return f"{start}Options of {group.lstrip('+')}: {', '.join(sorted(options))}"


def _plus_problems(o: Override, known: Known) -> Iterator[Problem]:
    group, value = o.key_or_group, (o.input_line or "").partition("=")[2]
    if not known.primary:
        return  # only Hydra knows the defaults list of a config of the user's own
    if group in known.chosen and o.is_add():
        reason = f"the default job has a choice for this group already ({group}={known.chosen[group]})"
        yield Problem(group, reason, f"replace it, without the +: {group}={value}")
    elif group == "strategy" and not o.is_add() and not o.is_force_add():
        yield Problem(group, "strategies are appended; the default job has none to replace", f"append it: +{group}={value}")


# ------------------------------------------------------------------ keys


def _key_problems(o: Override, known: Known) -> Iterator[Problem]:
    key = o.key_or_group
    kind = type_at(known.root, key)
    if kind is None:
        yield _unknown(o, known)
        return
    if o.is_add() and not _may_append(key, kind, known):
        yield Problem(key, "the key is in the config already", f"leave out the +: {(o.input_line or '').lstrip('+')}")
        return
    for value in _values(o):
        problem = _value_problem(key, kind, value, known.root)
        if problem is not None:
            yield problem


def _may_append(key: str, kind: Any, known: Known) -> bool:
    """Hydra takes `+` where the value is None, a list or a dict, and below open dicts."""
    if kind is Any or getattr(strip_optional(kind), "__origin__", None) in (list, dict):
        return True
    return OmegaConf.select(_defaults(known.root), key, throw_on_resolution_failure=False) is None


@functools.cache
def _defaults(root: type) -> Any:
    """The schema's own values. To be left as they are: making them takes long."""
    return OmegaConf.structured(root)


def _unknown(o: Override, known: Known) -> Problem:
    key, value = o.key_or_group, (o.input_line or "").partition("=")[2]
    if "." not in key and "/" not in key and any(value in options for options in known.groups.values()):
        near = nearest(key, known.groups)
        holders = near or [g for g, options in known.groups.items() if value in options]
        written = [f"{'' if g in field_types(known.root) else '+'}{g}={value}" for g in holders[:3]]
        return Problem(key, "no config key or group has this name", f"Did you mean {' or '.join(written)}?")
    if "/" in key:
        return Problem(key, "there is no such config group", did_you_mean(key, known.groups))
    return stranger(key, known.root, known.keys, list(known.groups))


def _value_problem(key: str, kind: Any, value: Any, root: type) -> Problem | None:
    inner = strip_optional(kind)
    if isinstance(inner, type) and dataclasses.is_dataclass(inner):
        if isinstance(value, dict) or (isinstance(value, str) and value.startswith("${")):
            return None
        names = ", ".join(f"{key}.{n}" for n in list(field_types(inner))[:6])
        return Problem(key, f"{describe(value)!r} can't stand for a whole node", f"set a key of it: {names}, ...")
    config = _defaults(root)
    now = copy.deepcopy(OmegaConf.select(config, key, throw_on_resolution_failure=False))  # a list is changed in place below
    if value is None or value == "":
        if NoneType in get_args(kind) or kind is Any or (value == "" and inner is str):
            return None
        return Problem(key, "no value is given", f"give {words(kind)}; default: {describe(now)}")
    try:
        OmegaConf.update(config, key, value, merge=True)
        OmegaConf.update(config, key, now, merge=False)
    except OmegaConfBaseException:
        return Problem(
            key,
            f"{describe(value)!r} is not {words(kind)}",
            f"write {key}={example(kind)}; default: {_default(now)}",
        )
    return None


def _default(now: Any) -> str:
    plain = OmegaConf.to_container(now) if OmegaConf.is_config(now) else now
    return "[" + ",".join(map(describe, plain)) + "]" if isinstance(plain, list) else describe(plain)


_WORDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_EXAMPLES: dict[Any, str] = {bool: "true", int: "8", float: "0.1", str: "name"}


def words(kind: Any) -> str:
    """A type in words."""
    if is_union(kind):
        return " or ".join(words(k) for k in get_args(kind) if k is not NoneType)
    if getattr(kind, "__origin__", None) is list:
        return f"a list (of {words(get_args(kind)[0])}), written [a,b]"
    if getattr(kind, "__origin__", None) is dict:
        return "a dict, written {a: 1}"
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return f"a dict with {', '.join(field_types(kind))}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def example(kind: Any) -> str:
    """A value of a type, as it is written."""
    kind = strip_optional(kind)
    if getattr(kind, "__origin__", None) is list:
        inner = example(get_args(kind)[0])
        return f"'[{inner},{inner}]'"
    return _EXAMPLES.get(kind, "<value>")
