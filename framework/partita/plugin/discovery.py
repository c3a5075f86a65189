"""Finding plug-ins: entry points, those to leave out, and errors that name a distribution."""

from __future__ import annotations

import inspect
import os
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as installed_entry_points
from typing import Any

from partita.errors import PluginError, did_you_mean
from partita.plugin.markers import API, PROJECT
from partita.plugin.wording import complaint

BLOCK_KEY = "plugins.block"
BLOCK_VARIABLE = "PARTITA_BLOCK_PLUGINS"
CORE = "partita.builtin"  # the core's own plug-in, which can't be left out


@dataclass(frozen=True)
class Found:
    """An entry point of group `partita`, not imported yet."""

    name: str
    entry: EntryPoint
    distribution: str = "unknown distribution"
    version: str = ""
    folder: str = ""

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"plug-in {self.name!r} ({' '.join(filter(None, (self.distribution, self.version)))})"


def find(entries: Iterable[EntryPoint] | None = None) -> list[Found]:
    """All entry points, sorted by distribution and name. `entries` replaces those that are installed.

    Raises PluginError where Partita's own are not installed.
    """
    if entries is not None:
        return sorted(map(_found, entries), key=lambda f: (f.distribution, f.name))
    found = find(installed_entry_points(group=PROJECT))
    if not any(f.entry.value == CORE for f in found):
        raise PluginError(
            "Partita's own plug-ins are not installed (its entry points are missing)\n"
            "    -> in the repository: pip install --editable . (or make train); it is not enough to put it on PYTHONPATH"
        )
    return found


def _found(entry: EntryPoint) -> Found:
    dist = entry.dist
    if dist is None:
        return Found(entry.name, entry)
    return Found(entry.name, entry, dist.name, dist.version, str(dist.locate_file("")))


def duplicates(found: Sequence[Found]) -> list[str]:
    """A problem for each name that two entry points have."""
    by_name: defaultdict[str, list[Found]] = defaultdict(list)
    for f in found:
        by_name[f.name].append(f)
    return [
        f"plug-in name {name!r} is taken by {len(same)} distributions: "
        + ", ".join(f"{f.distribution} {f.version} ({f.entry.value})" for f in same)
        + "\n    -> uninstall all but one of them, or have one renamed in its entry point"
        for name, same in by_name.items()
        if len(same) > 1
    ]


def blocking_problems(found: Sequence[Found], block: Sequence[str]) -> list[str]:
    """A problem for each blocked name that is not installed, or that nothing works without."""
    problems = []
    for name in dict.fromkeys(block):
        same = [f for f in found if f.name == name]
        if not same:
            where = f"{BLOCK_KEY} (or ${BLOCK_VARIABLE})"
            problems.append(complaint(f"{where}: no plug-in {name!r} is installed", did_you_mean(name, (f.name for f in found))))
        elif any(f.entry.value == CORE for f in same):
            problems.append(
                complaint(f"{BLOCK_KEY}: {name!r} is the core's own plug-in", "leave it out of the list; nothing runs without it")
            )
    return problems


def load(found: Found) -> Any:
    """Import one plug-in. Raises PluginError that names its distribution, the place and the way out."""
    try:
        plugin = found.entry.load()
    except (Exception, SystemExit) as error:
        reason = f"{found.label} failed to import {found.entry.value}: {type(error).__name__}: {error}{_place(error)}"
        without = "" if found.entry.value == CORE else f", or go on without it: {BLOCK_KEY}=[{found.name}]"
        raise PluginError(complaint(reason, f"repair or uninstall {found.distribution}{without}")) from error
    for check in (_class_problem, _api_problem):
        if problem := check(found, plugin):
            raise PluginError(problem)
    return plugin


def _place(error: BaseException) -> str:
    """Where the plug-in's own code failed: the innermost frame outside the import machinery."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename and f.filename != __file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _class_problem(found: Found, plugin: Any) -> str | None:
    if not inspect.isclass(plugin):
        return None
    return (
        f"{found.label}: its entry point names the class {plugin.__name__}, whose hooks can't be called without an instance\n"
        f"    -> make one in the module (plugin = {plugin.__name__}()) and name that: {found.entry.module}:plugin"
    )


def _api_problem(found: Found, plugin: Any) -> str | None:
    api = getattr(plugin, "partita_api", None)
    if type(api) is int and api == API:
        return None
    if type(api) is not int:
        what = "states no `partita_api`" if api is None else f"states partita_api = {api!r}, which is no whole number"
        return complaint(f"{found.label} {what}", f"write `partita_api = {API}` beside its hooks")
    newer = api > API
    remedy = "update Partita" if newer else f"update {found.distribution}"
    return (
        f"{found.label} was written for plug-in API {api}; this Partita has {API}\n"
        f"    -> {remedy}, or go on without it: {BLOCK_KEY}=[{found.name}]"
    )


# ------------------------------------------------------------------ plugins.block before there is a config


def block_from_argv(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Names to block, from the last `plugins.block=...` of a command line and from $PARTITA_BLOCK_PLUGINS, sorted.

    Blocked plug-ins are never imported, so they must be known before the config is composed. Raises PluginError for a value
    that is no list of names (a sweep over them, for example).
    """
    names = set(_names((os.environ if environ is None else environ).get(BLOCK_VARIABLE, ""), f"${BLOCK_VARIABLE}"))
    values = [value for word in argv for key, sep, value in [word.partition("=")] if sep and key.lstrip("+") == BLOCK_KEY]
    if values:
        names.update(_names(values[-1], BLOCK_KEY))
    return sorted(names)


def _names(text: str, where: str) -> list[str]:
    """`a,b` or `[a, b]`, each name quoted or not."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    elif where == BLOCK_KEY and "," in inner:
        inner = "["  # what Hydra would take as a sweep
    names = [n.strip().strip("'\"") for n in inner.split(",") if n.strip()]
    if inner.strip() in ("null", "None") or any(set(n) & set("[](){}=$ ") for n in names):
        raise PluginError(
            complaint(f"{where}: {text!r} is no list of plug-in names; it can't be swept either", f"{BLOCK_KEY}=[name,other]")
        )
    return names
