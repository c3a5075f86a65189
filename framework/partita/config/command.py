"""The command line: flags in front, overrides behind, and what Partita adds before Hydra sees it."""

from __future__ import annotations

import hashlib
import os
import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from partita.config.messages import outside, refusal
from partita.plan.problems import Problem
from partita.runtime.joining import joined

SWEEPS = "outputs/sweeps"
# Keys that don't change what a job computes, so that they don't name its folder either.
APART = ("run.redo", "run.name", "run.dir")


@dataclass(frozen=True)
class Command:
    """A parsed command line. `flags` are Hydra's, with their values; `unknown` are flags that nobody knows."""

    flags: Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def multirun(self) -> bool:
        """Whether a sweep is asked for."""
        return bool(self.flags.get("multirun"))

    @property
    def completes(self) -> bool:
        """Whether the shell asks for completions (or prints Hydra's own help): nothing is checked then."""
        return bool(self.flags.get("shell_completion") or self.flags.get("hydra_help"))

    @property
    def runs(self) -> bool:
        """Whether a job is run, and not only something shown."""
        return not any(self.flags.get(f) for f in ("help", "hydra_help", "cfg", "info", "shell_completion"))

    def argv(self) -> list[str]:
        """Flags first, overrides after, as Hydra wants them."""
        out: list[str] = []
        for name, value in self.flags.items():
            flag = "--" + name.replace("_", "-")
            out += [flag] if value is True else [flag, str(value)] if value else []
        return out + list(self.overrides)


def parse_command(argv: Sequence[str]) -> Command:
    """Sort flags from overrides, wherever they stand. Raises ConfigError for a flag with a wrong value."""
    parser = get_args_parser()
    _raise_instead_of_exit(parser)
    known, rest = parser.parse_known_intermixed_args(list(argv))
    flags = {name: value for name, value in vars(known).items() if name != "overrides" and value}
    unknown = tuple(a for a in rest if a.startswith("-"))
    overrides = [*known.overrides, *(a for a in rest if not a.startswith("-"))]
    if unknown:  # a lone word is the value of a flag that doesn't exist, not one more mistake
        overrides = [o for o in overrides if "=" in o or o.startswith("~")]
    command = Command(flags, tuple(overrides), unknown)
    _check_flags(command)
    return _absolute_folders(command)


def _check_flags(command: Command) -> None:
    """Raise ConfigError for flags that exclude each other (Hydra raises a bare ValueError)."""
    exclusive = ("run", "multirun", "cfg", "info", "shell_completion")
    given = [f"--{name.replace('_', '-')}" for name in exclusive if command.flags.get(name)]
    if len(given) > 1:
        raise refusal([Problem(" ".join(given), "these flags exclude each other", f"keep one of them: {' or '.join(given)}")])
    if command.flags.get("resolve") and not (command.flags.get("cfg") or command.flags.get("help")):
        raise refusal([Problem("--resolve", "resolving means showing a config", "add --cfg job")])


def _raise_instead_of_exit(parser: ArgumentParser) -> None:
    def error(message: str) -> NoReturn:
        flag = (re.findall(r"--?[\w-]+", message) or ["command line"])[0]
        raise refusal([Problem(flag, message, "--hydra-help lists the flags and their values")])

    parser.error = error  # type: ignore[method-assign]


def _absolute_folders(command: Command) -> Command:
    """Folders given on the command line are relative to where the user is. Raises ConfigError where there is none."""
    flags = dict(command.flags)
    for name in ("config_dir", "config_path"):
        value = flags.get(name)
        if value and "://" not in value:
            path = Path(value).absolute()
            if not path.is_dir():
                raise refusal([outside(path, "--" + name.replace("_", "-"))])
            flags[name] = str(path)
    return replace(command, flags=flags)


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Those that Hydra's grammar can read."""
    parser = OverridesParser.create()
    out = []
    for text in texts:
        try:
            out.append(parser.parse_override(text))
        except HydraException:
            continue  # the check of the overrides has told of it
    return out


# ------------------------------------------------------------------ folders


def job_folder(number: Any, overrides: str) -> str:
    """Folder of a job in its sweep: the number and what was swept, in characters that any file system takes."""
    name = re.sub(r"[^\w.=,+-]+", "_", str(overrides or ""))
    if len(name) > 120:
        name = name[:111] + "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{number}_{name}" if name else str(number)


def unless_auto(value: Any, *, _root_: Any) -> Any:
    """`value`, or auto where `parallel.others` is: options that nobody chose are left to the planner then (parallel=auto)."""
    return "auto" if OmegaConf.select(_root_, "parallel.others", default="default") == "auto" else value


OmegaConf.register_new_resolver("partita.unless_auto", unless_auto, replace=True)


# Hydra resolves the folder in the process that runs the job, which may be a launcher's worker: registered on import.
OmegaConf.register_new_resolver("partita.job_folder", job_folder, replace=True)


def sweep_folder(app: str, overrides: Sequence[Override], root: str = SWEEPS) -> str:
    """A folder that depends on what is asked and on nothing else, so that the same command finishes what is missing."""
    counted = sorted(o.input_line or "" for o in overrides if o.key_or_group not in APART and not _is_folder(o))
    digest = hashlib.sha256("\n".join([app, *counted]).encode()).hexdigest()[:8]
    names = [
        o.key_or_group.rsplit(".", 1)[-1].replace("/", "_")
        for o in overrides
        if o.is_sweep_override() and not o.is_hydra_override()
    ]
    return f"{root}/{'_'.join([*names[:4], digest])}"


def _is_folder(override: Override) -> bool:
    return override.key_or_group in ("hydra.sweep.dir", "hydra.sweep.subdir")


def sweep_additions(app: str, command: Command) -> Command:
    """The command with the sweep's folder and the names of what is the same in all jobs.

    Raises ConfigError for a swept `run.dir`.
    """
    overrides = parse_overrides(command.overrides)
    by_key = {o.key_or_group: o for o in overrides}
    rest = [o for o in command.overrides if not re.match(r"\+{0,2}run\.dir=", o)]
    added: list[str] = []
    run_dir = by_key.get("run.dir")
    if run_dir is not None and run_dir.is_sweep_override():
        raise refusal(
            [Problem("run.dir", "a sweep has one folder", "give one run.dir; each job gets a folder of its own inside it")]
        )
    if "hydra.sweep.dir" not in by_key:
        folder = str(run_dir.value()) if run_dir is not None else sweep_folder(app, overrides)
        added.append(f"hydra.sweep.dir={_quoted(folder)}")
    same = sorted({o.key_or_group for o in overrides if not o.is_sweep_override()} | set(APART))
    added.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(_quoted, same))}]")
    return replace(command, overrides=(*rest, *added))


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# ------------------------------------------------------------------ other launchers


def joined_rank() -> int | None:
    """The rank of this process, where another launcher has started it as one of several; else None."""
    if joined() is None:
        return None
    return int(os.environ["RANK"] if "RANK" in os.environ else os.environ["SLURM_PROCID"])


def joined_additions(command: Command, rank: int) -> Command:
    """One folder for all ranks, and only rank 0 writes Hydra's files. Raises ConfigError for a sweep."""
    if command.multirun:
        raise refusal(
            [
                Problem(
                    "--multirun",
                    "torchrun or Slurm has started this process as one rank of several, and a sweep needs new ranks for each job",
                    "start the sweep with python and let Partita start the ranks, or run one job at a time under torchrun",
                )
            ]
        )
    added = []
    if not any(re.match(r"\+{0,2}(hydra\.)?run\.dir=", o) for o in command.overrides):
        added.append(f"run.dir={_quoted(shared_folder(rank))}")
    if rank != 0:
        added.append("hydra.output_subdir=null")
    return replace(command, overrides=(*command.overrides, *added))


def shared_folder(rank: int, environment: Mapping[str, str] = os.environ) -> str:
    """A run folder on which all ranks agree: by torchrun's own store, or by the number of the Slurm job.

    The first rank to ask names it, and it stays the same when torchrun restarts the ranks, so that they resume. Raises
    ConfigError where there is nothing to agree by.
    """
    from datetime import datetime

    now = datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import TCPStore

        store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
        return store.compare_set("partita/run.dir", "", f"outputs/{now}").decode()
    if "SLURM_JOB_ID" in environment:
        return f"outputs/slurm/{environment['SLURM_JOB_ID']}-{environment.get('SLURM_STEP_ID', '0')}"
    raise refusal(
        [Problem("run.dir", "ranks that another launcher starts must agree on one folder", "give it: run.dir=<folder>")]
    )
