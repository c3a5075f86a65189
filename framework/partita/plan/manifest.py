"""What was asked for, what is in effect, and why where the two differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """One option. key: config path. reason: why `got` is not `asked`; empty where they agree."""

    key: str
    asked: Any
    got: Any
    reason: str = ""

    @property
    def differs(self) -> bool:
        """Whether the option is not in effect as it was written."""
        return self.asked != self.got


@dataclass(frozen=True)
class Manifest:
    """All options that were set or solved, by key."""

    lines: tuple[Line, ...] = ()

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def differences(self) -> list[Line]:
        """The lines a user must know of: what was written out and is not in effect as written (`auto` was not)."""
        return [line for line in self.lines if line.differs and line.asked not in ("auto", None, [])]

    def as_list(self) -> list[dict[str, Any]]:
        """For manifest.yaml and the tracker."""
        return [
            {"key": x.key, "asked": x.asked, "in_effect": x.got, **({"why": x.reason} if x.reason else {})} for x in self.lines
        ]


def make_manifest(config: Any, effects: Sequence[Line]) -> Manifest:
    """Effects told by the strategies, and every other option of `config` that is not its schema's default."""
    told = {line.key for line in effects}
    asked = [Line(key, value, value) for key, value in set_options(config) if key not in told]
    return Manifest(tuple(sorted([*effects, *asked], key=lambda line: line.key)))


def set_options(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(config path, value) of each leaf that differs from the default of its dataclass field."""
    for f in fields(node):
        value, key = getattr(node, f.name), prefix + f.name
        if is_dataclass(value):
            yield from set_options(value, key + ".")
        elif value != _default(f):
            yield key, value


def _default(f: Any) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING
