"""The config as plain dataclasses: the type of its root, and the way to a dict and back (for files and for spawned ranks)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from partita.config.schema import CORE_NODES
from partita.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from partita.plugin.registry import Registry


def root_type(registry: Registry) -> type:
    """The dataclass `Config`: a field for each node of core and plug-ins, and the keys that belong to no node."""
    nodes = {**CORE_NODES, **registry.nodes()}
    return _root(tuple(nodes.items()))


@functools.cache
def _root(nodes: tuple[tuple[str, type], ...]) -> type:
    leaves: list[Any] = [
        ("seed", int, 0),  # of weights, data order and dropout
        ("deepspeed", str | None, None),  # path of a DeepSpeed JSON config
    ]
    fields = [(name, schema, dataclasses.field(default_factory=schema)) for name, schema in nodes]
    return dataclasses.make_dataclass("Config", [*leaves, *fields], namespace={"__module__": __name__})


def to_plain(config: Any) -> dict[str, Any]:
    """Nested dicts, lists and scalars: what YAML, JSON and pickle can carry."""
    return dataclasses.asdict(config)


def from_plain(values: Mapping[str, Any], kind: type) -> Any:
    """The dataclass `kind` from what `to_plain` made of one. Fields that are not there get their default.

    Raises ConfigError for a key that `kind` doesn't have (a run folder of another version, or of a plug-in that is gone).
    """
    hints = _hints(kind)
    for key in values:
        if key not in hints:
            raise ConfigError(f"{key}: unknown key of {kind.__name__}\n    -> {did_you_mean(str(key), hints)}")
    return kind(**{key: _rebuild(value, hints[key]) for key, value in values.items()})


def _rebuild(value: Any, hint: Any) -> Any:
    hint = strip_optional(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return from_plain(value, hint)
    if isinstance(value, list | tuple):
        inner = get_args(hint)[0] if get_args(hint) else Any
        return [_rebuild(item, inner) for item in value]
    if isinstance(value, Mapping):
        inner = get_args(hint)[1] if len(get_args(hint)) == 2 else Any
        return {key: _rebuild(item, inner) for key, item in value.items()}
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def field_types(kind: type) -> dict[str, Any]:
    """Field name -> type of a dataclass, in order, with strings resolved."""
    return dict(_hints(kind))


def strip_optional(hint: Any) -> Any:
    """`X` of `X | None`; any other type as it is."""
    if is_union(hint):
        rest = [a for a in get_args(hint) if a is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def is_union(hint: Any) -> bool:
    """Whether a type is `A | B`, in either spelling."""
    import types

    return get_origin(hint) in (Union, types.UnionType)
