"""Errors of Hydra and OmegaConf in the words of Partita: key, reason, remedy; one screen whatever happens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from partita.errors import ConfigError, did_you_mean
from partita.plan.problems import Problem

SCREEN_LINES = 24  # a message never fills more


def refusal(problems: Sequence[Problem]) -> ConfigError:
    """All problems as one error that fits on a screen; what doesn't fit is counted."""
    lines: list[str] = []
    for i, problem in enumerate(problems, 1):
        number = f"{i}. " if len(problems) > 1 else ""
        text = [_cut(line) for line in f"{number}{problem}".splitlines()]
        if len(lines) + len(text) > SCREEN_LINES - 2:
            lines.append(f"... and {len(problems) - i + 1} more; they are shown when these are repaired")
            break
        lines += text
    return ConfigError("\n".join(lines))


def _cut(line: str, width: int = 400) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def translate(error: BaseException, keys: Sequence[str] = ()) -> ConfigError:
    """The ConfigError for something that Hydra or OmegaConf raised. `keys`: known config paths, for suggestions."""
    return refusal([_problem(error, keys)])


def is_config_trouble(error: BaseException) -> bool:
    """Whether an exception means that the config or the command line is wrong (and not the program)."""
    return isinstance(error, HydraException | OmegaConfBaseException)


def _problem(error: BaseException, keys: Sequence[str]) -> Problem:
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        return parse_problem(error.override, error.message)
    if isinstance(error, MissingConfigException):
        return _missing_file(error)
    if isinstance(cause, OmegaConfBaseException):
        return _omegaconf(cause, _origin(str(error)), keys)
    if isinstance(error, OmegaConfBaseException):
        return _omegaconf(error, "", keys)
    if "raised while composing config" in str(error):
        return _in_file(str(error), keys)
    if isinstance(error, ConfigCompositionException | HydraException):
        return _composition(str(error))
    return Problem("config", _first_line(str(error)) or type(error).__name__, "see --cfg job for what the command composes")


def parse_problem(override: str, message: str) -> Problem:
    """An override that Hydra's grammar can't read."""
    key, equals, value = override.partition("=")
    if not equals:
        return Problem(
            override, "an override needs a value: key=value", f"write {override.lstrip('+')}=<value>, or ~{override} to remove it"
        )
    if value.startswith("("):
        return Problem(
            key, f"{value!r} is not how a list is written", f"lists have square brackets: '{key}=[{value.strip('()')}]'"
        )
    if value.count("[") != value.count("]"):
        return Problem(key, f"the list {value!r} is not closed, or the shell cut it", f"quote it whole: '{key}=[...]'")
    if "$" in value:
        return Problem(key, f"the interpolation {value!r} can't be read", "write ${section.key} and quote the whole override")
    return Problem(key, f"{value!r} can't be read: {_first_line(message)}", f"quote it twice: '{key}=\"{value}\"'")


def _missing_file(error: MissingConfigException) -> Problem:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    group = group.lstrip("/")
    if error.options:
        return Problem(
            group or "config", f"there is no option {option!r} in group {group!r}", _sentence(did_you_mean(option, error.options))
        )
    reason = _first_line(str(error))
    return Problem(
        group or "config", reason, "give a group and option that exist; --help lists them (--config-dir adds a folder of yours)"
    )


def _omegaconf(error: OmegaConfBaseException, origin: str, keys: Sequence[str]) -> Problem:
    key = str(getattr(error, "full_key", None) or "config")
    reason = _first_line(str(error))
    where = f" (in {origin})" if origin else ""
    if isinstance(error, UnsupportedInterpolationType):
        return Problem(key, f"{reason}{where}", "resolvers are written ${name:argument}; keys are written ${section.key}")
    if key.split(".")[0] == "hydra":
        return Problem(key, f"{reason}{where}", "this is Hydra's own node; --cfg hydra shows it")
    if isinstance(error, InterpolationKeyError | InterpolationResolutionError):
        name = (re.findall(r"'([^']+)' not found", reason) or [""])[0]
        remedy = _sentence(did_you_mean(name, keys)) if name else "name a key that exists, as ${section.key}"
        return Problem(key, f"{reason}{where}", remedy)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return Problem(key, f"unknown config key{where}", _sentence(did_you_mean(key, keys)))
    if isinstance(error, ValidationError):
        return Problem(key, f"{reason}{where}", "give a value of the key's type; --cfg job shows the value it has now")
    if isinstance(error, MissingMandatoryValue):
        return Problem(key, "has no value", f"give one: {key}=<value>")
    return Problem(key, f"{reason}{where}", "see --cfg job for what the command composes")


def _composition(text: str) -> Problem:
    """Hydra's own sentences, which depend on no class of exception."""
    if found := re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text):
        group = found[1]
        return Problem(
            group,
            "the default job has no choice for this group, so there is nothing to override",
            f"append it: +{group}=<option>",
        )
    if found := re.search(r"Multiple values for ([\w/@.]+)", text):
        return twice(found[1])
    if found := re.search(r"Ambiguous value for argument '([^=']+)=([^']*)'", text):
        return several(found[1], found[2])
    if found := re.search(r"An item is already at '([^']+)'", text):
        return Problem(found[1], "the key is in the config already", f"leave out the +: {found[1]}=<value>")
    if found := re.search(r"Could not delete.*?'([^']+)'", text):
        return Problem(found[1], _first_line(text), "remove only what is there; --cfg job shows it")
    if found := re.search(r"config group '([^']+)' does not", text):
        return Problem(found[1], "there is no such config group", "--help lists the groups")
    return Problem("config", _first_line(text), "see --cfg job, and --info defaults-tree for which file brings what")


def _in_file(text: str, keys: Sequence[str]) -> Problem:
    """A YAML file that doesn't fit the schema."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    key = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "") or "config"
    reason = lines[1] if len(lines) > 1 else lines[0]
    if reason.startswith("Key '"):
        remedy = _sentence(did_you_mean(key, {*keys, *(k.split(".")[0] for k in keys)}))
        return Problem(key, f"unknown config key (in {_origin(text)})", remedy)
    return Problem(key, f"{reason} (in {_origin(text)})", "give a value of the key's type; --cfg job shows its default")


def twice(group: str) -> Problem:
    """One group chosen two times."""
    if group in ("strategy", "experiment"):
        remedy = f"stack them in one list: '+{group}=[a,b]'; an experiment that has a strategy takes another as strategy=NAME"
    else:
        remedy = f"choose once: {group}=<option>, without +. Two strategies that set {group!r} can't be stacked"
    return Problem(group, "two options are chosen for one group", remedy)


def several(key: str, value: str, maybe_list: bool = True) -> Problem:
    """A sweep without -m."""
    remedy = "add -m to run a job for each" + (f", or write a list: '{key}=[{value}]'" if maybe_list else "; the key takes one")
    return Problem(key, f"{value!r} is several values", remedy)


def _origin(text: str) -> str:
    """The YAML file that Hydra names, if it names one."""
    found = re.search(r"In '([^']+)'", text)
    return f"{found[1]}.yaml" if found else ""


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def unknown_flag(flag: str, keys: Sequence[str]) -> Problem:
    """`--lr 3` and its like: options are given as key=value."""
    name = flag.lstrip("-").partition("=")[0].replace("-", "_")
    leaf = [key for key in keys if key.rsplit(".", 1)[-1] == name]
    near = " or ".join(f"{key}=<value>" for key in leaf[:3]) or "key=value; --hydra-help lists the flags there are"
    return Problem(flag, "there is no such flag", f"config is given without dashes: {near}")


def outside(path: str | Path, what: str) -> Problem:
    """A file that the command line names and that is not there."""
    return Problem(what, f"{str(path)!r} does not exist", "give the path of a file or folder that is there")


def describe(value: Any) -> str:
    """A value as a user would write it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
