"""A DeepSpeed config from what a user has: a file of JSON, Hjson or YAML, an Accelerate file around one, or base64 text."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from partita.config.deepspeed import hjson
from partita.config.messages import refusal
from partita.plan.problems import Problem

LARGEST = 4 << 20  # bytes of a file; a config has some thousand
NEEDED = "give a DeepSpeed config: a file of JSON, Hjson or YAML, or Accelerate's YAML around one"


@dataclass(frozen=True)
class Read:
    """values: keys as they stand in the file. where: for messages. folder: that relative paths inside it start from."""

    values: dict[str, Any]
    where: str
    folder: Path = field(default_factory=Path.cwd)


def read(source: str) -> Read:
    """The config that `source` (a path, or base64 text) holds. Raises ConfigError that names the file and the line."""
    path = Path(source).expanduser()
    if not _is_file(path):
        values = _from_base64(source)
        if values is None:
            what = "is a folder" if _is_folder(path) else "does not exist"
            raise refusal([Problem("deepspeed", f"{_short(source)!r} {what}", NEEDED)])
        return Read(_mapping(values, "the text"), "the base64 text")
    return Read(_mapping(_parse(_text(path), path), str(path)), str(path), path.absolute().parent)


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _from_base64(text: str) -> Any:
    """As DeepSpeed's launcher passes configs on; None for text that is none."""
    try:
        decoded = base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)).decode("utf-8")
        return hjson.parse(decoded) if decoded.lstrip().startswith("{") else None
    except (binascii.Error, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise _unreadable(path, f"has {path.stat().st_size} bytes, which no config needs", NEEDED)
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, f"can't be read: {error.strerror}", "give a file that you may read") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            return data.decode("utf-16")
        except UnicodeDecodeError as error:
            raise _unreadable(path, f"is no UTF-16 text: {error.reason}", "save it as UTF-8") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is no UTF-8 text (byte {error.start})", "save it as UTF-8") from error


def _parse(text: str, path: Path) -> Any:
    if path.suffix.lower() in (".yaml", ".yml"):
        return _yaml(text, path)
    if path.suffix.lower() in (".json", ".hjson", ".jsonc") or _begins_as_json(text):
        try:
            return hjson.parse(text)
        except hjson.Duplicate as error:
            raise _duplicate(path, error.path, str(error)) from error
        except hjson.HjsonError as error:
            raise _unreadable(
                path, f"can't be read: {error}", "repair it there; comments and trailing commas are allowed"
            ) from error
    return _yaml(text, path)


def _begins_as_json(text: str) -> bool:
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith(("//", "#", "/*", "*"))), "")
    return first.startswith("{")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, dict) and value and all(isinstance(k, str) for k in value):
        return value
    if isinstance(value, dict) and value:
        odd = next(k for k in value if not isinstance(k, str))
        raise refusal([Problem("deepspeed", f"{where}: the key {odd!r} is no text", NEEDED)])
    what = "is empty" if value is None or value == {} else f"holds a {type(value).__name__}, not keys with values"
    raise refusal([Problem("deepspeed", f"{where} {what}", NEEDED)])


def _unreadable(path: Path, reason: str, remedy: str) -> Exception:
    return refusal([Problem("deepspeed", f"{path} {reason}", remedy)])


def _duplicate(path: Path, key: str, reason: str) -> Exception:
    return refusal([Problem(key, f"{path}: {reason}; readers disagree about which of the two counts", "keep one of them")])


# ------------------------------------------------------------------ YAML


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key that stands twice, and keeps dates as text."""


class _Twice(yaml.YAMLError):
    def __init__(self, key: str, line: int) -> None:
        super().__init__(f"{key!r} stands twice (line {line})")
        self.key = key


def _construct(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    out: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, list | dict):
            raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key must be text")
        if key in out:
            raise _Twice(str(key), key_node.start_mark.line + 1)
        out[key] = loader.construct_object(value_node, deep=True)
    return out


_Loader.add_constructor("tag:yaml.org,2002:map", _construct)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: str(node.value))


def _yaml(text: str, path: Path) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: nothing is executed
    except _Twice as error:
        raise _duplicate(path, error.key, str(error)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _unreadable(path, f"is no YAML: {what}{line}", "repair it there") from error
