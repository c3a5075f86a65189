"""Keys that no dataclass knows. Hydra's `+` lets them in (`+stratgy=zero3`); this closes the door behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf

from partita.config.plain import field_types, strip_optional
from partita.errors import nearest
from partita.plan.problems import Problem


def strangers(config: DictConfig, root: type, groups: Iterable[str] = ()) -> list[Problem]:
    """A problem for each key of `config` that the dataclasses below `root` don't have. `groups`: for suggestions."""
    keys = list(leaves(root))
    names = list(groups)
    return [stranger(path, root, keys, names) for path in _walk(config, root, "")]


def _walk(node: Any, kind: Any, prefix: str) -> Iterator[str]:
    kind = strip_optional(kind)
    if isinstance(node, ListConfig):
        inner = get_args(kind)[0] if get_args(kind) else Any
        for i in range(len(node)):
            yield from _walk(_raw(node, i), inner, f"{prefix}{i}.")
        return
    if not isinstance(node, DictConfig) or not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return  # a leaf, or a dict that is open on purpose (model.options)
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    types = field_types(kind)
    for key in node:
        if not prefix and key == "hydra":
            continue
        if key not in types:
            yield f"{prefix}{key!s}"
        else:
            yield from _walk(_raw(node, key), types[str(key)], f"{prefix}{key!s}.")


def _raw(node: Any, key: Any) -> Any:
    return node._get_node(key)


def stranger(path: str, root: type, keys: Sequence[str], groups: Sequence[str]) -> Problem:
    """The problem for one unknown key, with the nearest names: in its node, by its last word anywhere, and among the groups."""
    parent, _, name = path.rpartition(".")
    near: list[str] = []
    if not parent:
        near += [f"+{g}=<option>" if g not in field_types(root) else f"{g}=<option>" for g in nearest(name, groups, 2)]
    else:
        near += [f"{parent}.{n}" for n in nearest(name, _names(root, parent), 2)]
    near += [key for key in keys if key.rsplit(".", 1)[-1] == name]
    if not near:
        near += nearest(path, keys, 3)
    near = list(dict.fromkeys(near))[:4]
    remedy = f"Did you mean {' or '.join(near)}?" if near else _listing(root, parent)
    return Problem(path, "unknown config key", remedy)


def _names(root: type, path: str) -> list[str]:
    kind = type_at(root, path)
    return list(field_types(kind)) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else []


def _listing(root: type, parent: str) -> str:
    names = _names(root, parent) if parent else list(field_types(root))
    return f"keys {'of ' + parent if parent else 'there are'}: {', '.join(names[:16])}" + (", ..." if len(names) > 16 else "")


def type_at(root: type, path: str) -> Any:
    """The type that the schema has at a config path; None for an unknown path, Any below open dicts."""
    kind: Any = root
    for part in path.split(".") if path else ():
        kind = strip_optional(kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            types = field_types(kind)
            if part not in types:
                return None
            kind = types[part]
        elif getattr(kind, "__origin__", None) is list and part.isdigit():
            kind = get_args(kind)[0]
        elif getattr(kind, "__origin__", None) is dict:
            return Any
        else:
            return None
    return kind


def leaves(root: type, prefix: str = "") -> Iterator[str]:
    """All config paths of a dataclass that hold a value and no node."""
    for name, kind in field_types(root).items():
        kind = strip_optional(kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def missing(config: DictConfig) -> list[Problem]:
    """A problem for each mandatory value (`???`) that nobody gave."""
    return [Problem(key, "has no value", f"give one: {key}=<value>") for key in sorted(OmegaConf.missing_keys(config))]
