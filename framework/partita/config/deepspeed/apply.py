"""A DeepSpeed config on its way into the plain config: single keys of the command line win, whole options must agree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from partita.config.deepspeed import accelerate
from partita.config.deepspeed.reading import read
from partita.config.deepspeed.report import FILLED, REFUSED, UNNEEDED, Line, Translation
from partita.config.deepspeed.rules import shown
from partita.config.deepspeed.walk import Native, translate
from partita.config.messages import refusal
from partita.config.overrides import words
from partita.config.plain import strip_optional
from partita.config.strangers import leaves, type_at
from partita.plan.problems import Problem

# our keys whose values are names of a slot
SLOT_KEYS = {"optimizer.name": "optimizer", "lr_schedule.name": "lr_schedule", "tracker.name": "tracker"}
LAYOUT = ("launch.ranks", "parallel.")


def translate_source(source: str, native: Native) -> Translation:
    """The translation of a file (or base64 text). Raises ConfigError where it can't be read; refusals are lines of the result."""
    found = read(source)
    if not accelerate.is_wrapper(found.values):
        return translate(found.values, found.where, native)
    wrapper = accelerate.unwrap(found.values, found.folder)
    native = dataclasses.replace(native, ranks_given=native.ranks_given or "launch.ranks" in wrapper.values)
    out = translate(wrapper.tree, wrapper.where or found.where, native)
    out.where = found.where
    out.lines = [*wrapper.lines, *out.lines]
    out.values = {**wrapper.values, **out.values}
    return out


def apply(config: Any, registry: Any, overrides: Sequence[str], chosen: Mapping[str, str] | None = None) -> Translation | None:
    """Put what `config.deepspeed` says into `config`, in place; None without one.

    overrides: the command line. chosen: key -> the option of the command line that sets it. A single key of the command line wins, and
    the report says so; a chosen option that says something else than the file is refused (an experiment's is replaced), and so is
    everything in the file that can't be carried out: one ConfigError for all.
    """
    if config.deepspeed is None:
        return None
    said = frozenset(o.lstrip("+~").partition("=")[0] for o in overrides)
    translation = translate_source(config.deepspeed, native_of(config, registry, said))
    problems = [*translation.problems(), *_settle(config, translation, said, chosen or {})]
    if problems:
        raise refusal(problems)
    return translation


def native_of(config: Any, registry: Any, said: frozenset[str] = frozenset()) -> Native:
    """Our side: keys and names that this installation has, and values without the file."""
    slots = registry.slots()
    return Native(
        keys=_keys(cast(Any, type(config))),
        slots={key: tuple(slots.get(slot, ())) for key, slot in SLOT_KEYS.items()},
        current=lambda key: _get(config, key),
        ranks_given=any(key.startswith(LAYOUT) for key in said),
    )


@functools.cache
def _keys(root: Any) -> frozenset[str]:
    return frozenset(leaves(root))


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config


def _settle(config: Any, translation: Translation, said: frozenset[str], chosen: Mapping[str, str]) -> list[Problem]:
    """Set the values; problems where a chosen option says something else, or where our key can't hold the value."""
    problems = []
    for key, value in list(translation.values.items()):
        now, option = _get(config, key), chosen.get(key, "")
        if now == value and (key in said or option):
            continue
        lines = [line for line in translation.lines if line.key == key]
        if key in said or (option and lines and all(line.verdict == FILLED for line in lines)):
            _overruled(translation, key, now, f"{key}={shown(now)}" if key in said else option)
        elif option and not option.startswith("experiment="):
            reason = f"{option} of the command line chooses {key}={shown(now)}, and {translation.where} says {shown(value)}"
            remedy = f"leave one of them out; a single key overrules the file: {key}={shown(now)}"
            problems.append(Problem(option.partition("=")[0], reason, remedy))
        elif problem := _put(config, key, value):
            problems.append(problem)
    return problems


def _overruled(translation: Translation, key: str, now: Any, by: str) -> None:
    for i, line in enumerate(translation.lines):
        if line.key == key and line.verdict != REFUSED:
            translation.lines[i] = Line(line.path, line.value, UNNEEDED, why=f"{by} on the command line overrules it")
    translation.values[key] = now


def _put(config: Any, key: str, value: Any) -> Problem | None:
    kind = type_at(type(config), key)
    if not _fits(value, kind):
        return Problem(
            "deepspeed", f"{key} would be {shown(value)}, which is not {words(kind)}", f"give {key} on the command line"
        )
    *parents, leaf = key.split(".")
    node = config
    for part in parents:
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    if isinstance(node, dict):
        node[leaf] = value
    else:
        setattr(node, leaf, value)
    return None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has a field's type; int counts as float, as everywhere in the config."""
    if kind is Any or kind is None:
        return True
    inner = strip_optional(kind)
    options = getattr(inner, "__args__", None) if "|" in str(inner) or "Union" in str(inner) else (inner,)
    for option in options or ():
        if getattr(option, "__origin__", option) in (list, dict):
            return isinstance(value, option.__origin__ if hasattr(option, "__origin__") else option)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return True
        if option in (int, str, bool) and type(value) is option:
            return True
    return False
