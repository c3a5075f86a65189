"""The language of the tables: what a DeepSpeed key may hold, and what becomes of it. Rules are values; `walk.py` carries them out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.config.deepspeed.hjson import Bare

AUTO = "auto"
# Placeholders of templates: CONFIG_FP16_ENABLED, $VAR, ${learning_rate}, <batch size>, {{ lr }}, %LR%
_PLACEHOLDER = re.compile(r"\$\{?[\w.:]+\}?|\$\{.*|\{\{.*\}\}|<[^>]+>|%\w+%|@\w+@|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


class WrongValue(ValueError):
    """A value that a key can't hold: what it should be, in words."""


def is_placeholder(value: Any) -> bool:
    """Whether a value is a token of a template that nobody has filled."""
    return isinstance(value, str) and bool(_PLACEHOLDER.fullmatch(value.strip()))


# ------------------------------------------------------------------ what a key may hold: value -> value, or WrongValue


def number(value: Any) -> float:
    """A finite number; text such as "1e-4" counts, as in YAML 1.1."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise WrongValue("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongValue("a number")
    try:
        value = float(value)
    except OverflowError:
        raise WrongValue("a finite number") from None
    if not math.isfinite(value):
        raise WrongValue("a finite number")
    return value


def integer(value: Any) -> int:
    """A whole number; 5e8 and "8" count, 0.5 doesn't."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        real = number(value)
    except WrongValue:
        raise WrongValue("a whole number") from None
    if real != math.floor(real):
        raise WrongValue("a whole number")
    return int(real)


def _at_least(kind: Callable[[Any], Any], least: float, words: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        try:
            found = kind(value)
        except WrongValue:
            raise WrongValue(words) from None
        if found < least:
            raise WrongValue(words)
        return found

    return check


count = _at_least(integer, 1, "a whole number of at least 1")
size = _at_least(integer, 0, "a whole number of at least 0")
amount = _at_least(number, 0.0, "a number of at least 0")


def positive(value: Any) -> float:
    """A number above 0."""
    found = amount(value)
    if found <= 0:
        raise WrongValue("a number above 0")
    return float(found)


def share(value: Any) -> float:
    """A number from 0 to 1."""
    found = amount(value)
    if found > 1:
        raise WrongValue("a number from 0 to 1")
    return float(found)


def boolean(value: Any) -> bool:
    """true or false; the words as text and 0 and 1 count."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word not in _BOOLS:
        raise WrongValue("true or false")
    return _BOOLS[word]


def text(value: Any) -> str:
    """Any text, or a number that stands for one."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise WrongValue("text")
    return str(value)


def anything(value: Any) -> Any:
    """Any value."""
    return value


def betas(value: Any) -> list[float]:
    """Two decay rates; apex writes a third one, which is refused."""
    if not isinstance(value, list) or len(value) != 2:
        raise WrongValue("two numbers [b1, b2]")
    found = [share(v) for v in value]
    if any(b >= 1 for b in found):
        raise WrongValue("two numbers below 1")
    return found


def words(*known: str) -> Callable[[Any], str]:
    """One of these words, in any case."""
    by_word = {k.lower(): k for k in known}

    def check(value: Any) -> str:
        found = by_word.get(value.strip().lower()) if isinstance(value, str) else None
        if found is None:
            raise WrongValue("one of " + ", ".join(known))
        return found

    return check


def stage(value: Any) -> int:
    """A ZeRO stage, 0 to 3."""
    if isinstance(value, list):
        raise WrongValue("one stage; a list is the autotuner's (run a sweep: -m zero.stage=0,1,2,3)")
    try:
        found = integer(value)
    except WrongValue:
        found = -1
    if not 0 <= found <= 3:
        raise WrongValue("0, 1, 2 or 3")
    return found


# ------------------------------------------------------------------ what becomes of a value


@dataclass(frozen=True)
class Take:
    """Becomes `key` of ours. mapping: their value -> ours, where they differ. note: for the report."""

    key: str
    mapping: Mapping[Any, Any] | Callable[[Any], Any] | None = None
    note: str = ""


@dataclass(frozen=True)
class Drop:
    """Not needed: `why`."""

    why: str


@dataclass(frozen=True)
class Deny:
    """Can't be carried out: `why`, and what to write instead. unless: values that ask for nothing, which are not needed."""

    why: str
    remedy: str
    unless: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Cases:
    """By value; `otherwise` for those not listed."""

    cases: Mapping[Any, Take | Drop | Deny]
    otherwise: Take | Drop | Deny


@dataclass(frozen=True)
class Later:
    """Several keys decide together (`combine.py`)."""


Outcome = Take | Drop | Deny | Cases | Later


@dataclass(frozen=True)
class Rule:
    """kind: what the key may hold. then: what becomes of it. auto: by which rule "auto" is filled; empty: nobody fills it.

    needs: (path, values, why): the rule holds only where that key has one of these values, else the key is not needed.
    default: what DeepSpeed takes where the key is left out, told only where a section that is on must have it.
    """

    kind: Callable[[Any], Any]
    then: Outcome
    auto: str = ""
    needs: tuple[str, tuple[Any, ...], str] | None = None
    default: Any = None


@dataclass(frozen=True)
class Section:
    """A block of keys.

    switch: key that turns it on. off: its value where the key is left out. idle: why nothing of it is needed while off.
    open: keys that no rule names are not needed either, because of this. needed: the switch must stand there.
    """

    switch: str | None = None
    on_by_default: bool = False
    idle: str = "the section is switched off"
    open: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Table:
    """Rules by path, sections by path, other names by path."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    strangers: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Table) -> Table:
        return Table(
            {**self.rules, **other.rules},
            {**self.sections, **other.sections},
            {**self.aliases, **other.aliases},
            {**self.strangers, **other.strangers},
        )


def under(prefix: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules with their section in front."""
    return {f"{prefix}.{key}": rule for key, rule in rules.items()}


def dropped(kinds: Mapping[Callable[[Any], Any], Sequence[str]], why: str) -> dict[str, Rule]:
    """Keys that need nothing, all for one reason."""
    return {key: Rule(kind, Drop(why), auto=why) for kind, keys in kinds.items() for key in keys}


def shown(value: Any) -> str:
    """A value for messages, short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    out = str(value) if isinstance(value, Bare | int | float) else repr(value)
    return out if len(out) <= 60 else out[:57] + "..."
