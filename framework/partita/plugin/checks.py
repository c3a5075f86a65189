"""What pluggy doesn't see in a plug-in's hooks: misspelt names and arguments, forgotten markers, defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from partita.errors import did_you_mean
from partita.plugin import hookspecs
from partita.plugin.markers import PROJECT
from partita.plugin.wording import complaint

# hook -> its arguments
HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters) for name, spec in vars(hookspecs).items() if hasattr(spec, f"{PROJECT}_spec")
}
# The core calls these plug-in by plug-in, to know whose answer it is; a wrapper would see one of them only.
ONE_BY_ONE = ("partita_config", "partita_slots", "partita_decide", "partita_check", "partita_estimate", "partita_transforms")

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def hook_problems(plugin: Any, label: str) -> list[str]:
    """All that is wrong with the hooks of a plug-in, each with its remedy. `label` names the plug-in."""
    problems = []
    for attribute, function, options in _candidates(plugin):
        if options is None:
            problems.append(
                complaint(f"{label}: {attribute} is not marked as a hook, so it would never be called", "put @hookimpl above it")
            )
            continue
        hook = options.get("specname") or attribute
        if hook in HOOKS:
            problems += [f"{label}: {attribute}{p}" for p in _implementation_problems(hook, function, options)]
        elif not options.get("optionalhook"):
            problems.append(complaint(f"{label}: there is no hook {hook!r}", f"{did_you_mean(hook, HOOKS)}"))
    return problems


def implemented(plugin: Any) -> list[str]:
    """Names of the hooks that a plug-in implements, in the order of a run's life."""
    names = {options.get("specname") or attribute for attribute, _, options in _candidates(plugin) if options}
    return [hook for hook in HOOKS if hook in names]


def _candidates(plugin: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """(attribute, function, marker's options or None) of marked functions, and of unmarked ones with the name of a hook."""
    for attribute in dir(plugin):
        raw = inspect.getattr_static(plugin, attribute, None)
        plain = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        if not inspect.isroutine(plain):  # properties are left alone: reading one could run anything
            continue
        options = getattr(plain, f"{PROJECT}_impl", None)
        if options is not None or attribute in HOOKS:
            yield attribute, getattr(plugin, attribute), options


def _implementation_problems(hook: str, function: Callable[..., Any], options: Any) -> Iterator[str]:
    known = HOOKS[hook]
    takes = f"{hook}({', '.join(known)})"
    for p in inspect.signature(function).parameters.values():
        if p.kind not in _NAMED:
            yield complaint(f" takes {p}, which is never filled", f"name the arguments it needs, of {takes}")
        elif p.name not in known:
            yield complaint(
                f" has an argument {p.name!r} that the hook doesn't", f"{did_you_mean(p.name, known)} The hook is {takes}"
            )
        elif p.default is not p.empty:
            yield complaint(
                f" gives its argument {p.name!r} a default, which would hide a misspelling", f"write {p.name} without one"
            )
    if hook in ONE_BY_ONE and (options.get("wrapper") or options.get("hookwrapper")):
        yield complaint(
            " is a wrapper, but this hook is called for each plug-in by itself", "return a result of your own instead"
        )
