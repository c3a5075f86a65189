"""From a command line to plain dataclasses: the door. Nothing past it sees Hydra or OmegaConf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from partita.config.checks import check_config
from partita.config.command import Command, joined_additions, joined_rank, parse_command, sweep_additions
from partita.config.deepspeed.apply import apply
from partita.config.deepspeed.report import Translation
from partita.config.job import JobInfo, job_info
from partita.config.messages import is_config_trouble, refusal, translate, unknown_flag
from partita.config.overrides import Known, override_problems
from partita.config.plain import field_types, root_type
from partita.config.stacking import keys_by_option, stacking_problems
from partita.config.strangers import leaves, missing, strangers
from partita.errors import ConfigError
from partita.plan.problems import Problem
from partita.plugin.registry import Registry, block_from_argv

PACKAGE = "partita_conf"
VERSION_BASE = "1.3"

Job = Callable[[Any, JobInfo], Any]


class PartitaSearchPath(SearchPathPlugin):
    """Config packages of plug-ins, behind ours; and ours behind a primary config of the user's own."""

    folders: tuple[str, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra once for each search path that it makes."""
        known = {element.path for element in search_path.get_path()}
        for folder in self.folders:
            if folder not in known:
                search_path.append("partita", folder)


@functools.cache
def registry_for(blocked: tuple[str, ...]) -> Registry:
    """The registry without these plug-ins; loaded once in a process."""
    return Registry.load(blocked)


def prepare(registry: Registry, config_dir: str | None = None) -> type:
    """Tell Hydra of schemas and config packages; returns the root dataclass. Cheap to repeat."""
    root = root_type(registry)
    _store(root)
    PartitaSearchPath.folders = tuple(f"pkg://{p}" for p in [PACKAGE, *registry.packages()]) + (
        (f"file://{config_dir}",) if config_dir else ()
    )
    plugins = Plugins.instance()
    if PartitaSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(PartitaSearchPath)
    return root


@functools.lru_cache(maxsize=1)
def _store(root: type) -> None:
    """Only when it is another one than last time: making the node takes long."""
    ConfigStore.instance().store(name="root_schema", node=root, provider="partita")


@contextmanager
def _hydra(config_path: str | None) -> Iterator[Any]:
    """Hydra's composer without its application."""
    GlobalHydra.instance().clear()
    start: Any
    if config_path is None or config_path.startswith("pkg://"):
        module = PACKAGE if config_path is None else config_path.removeprefix("pkg://")
        start = initialize_config_module(module, job_name="partita", version_base=VERSION_BASE)
    else:
        start = initialize_config_dir(config_path, job_name="partita", version_base=VERSION_BASE)
    with start:
        yield GlobalHydra.instance().config_loader()


# ------------------------------------------------------------------ before composing


@functools.cache
def default_choices() -> dict[str, str]:
    """Group -> option of the shipped defaults list."""
    from importlib.resources import files

    entries = OmegaConf.create((files(PACKAGE) / "config.yaml").read_text()).defaults
    pairs = [next(iter(e.items())) for e in entries if OmegaConf.is_dict(e)]
    return {str(group): str(option) for group, option in pairs if not str(group).startswith("override ")}


def without_blocked(root: type, overrides: Sequence[str]) -> list[str]:
    """Overrides that take groups of plug-ins that are not here out of the defaults list."""
    absent = [group for group in default_choices() if group not in field_types(root)]
    return [f"~{group}" for group in absent if not any(o == f"~{group}" for o in overrides)]


def refuse_mistakes(command: Command, root: type, config_name: str, registry: Registry) -> None:
    """Raise ConfigError that lists all mistakes of a command line, with those that the rest of the config has besides."""
    with _hydra(command.flags.get("config_path")) as loader:
        primary = config_name == "config" and not command.flags.get("config_path")
        known = Known.of(root, loader, default_choices() if primary else {})
        problems = [unknown_flag(flag, known.keys) for flag in command.unknown]
        wrong, right = override_problems(command.overrides, known, command.multirun)
        problems += wrong or stacking_problems(command.overrides, loader, known)
        if problems and not command.multirun:
            problems += _problems_besides(config_name, [*right, *without_blocked(root, right)], root, registry)
    if problems:
        raise refusal(problems)


def _problems_besides(config_name: str, overrides: Sequence[str], root: type, registry: Registry) -> list[Problem]:
    """What is wrong even without the overrides that are wrong themselves; only values that the user gave are looked at."""
    given = {o.lstrip("+").partition("=")[0] for o in overrides}
    try:
        config = to_objects(compose(config_name, list(overrides)), root)
    except Exception as error:
        if isinstance(error, ConfigError) or is_config_trouble(error):
            return []  # the mistakes that are known come first
        raise
    return [p for p in check_config(config, registry.slots(), together=False) if p.key in given]


# ------------------------------------------------------------------ the door


def to_objects(config: DictConfig, root: type) -> Any:
    """Plain dataclasses of a composed config: no stranger, nothing missing, every interpolation resolved.

    Raises ConfigError with all problems of a kind.
    """
    config = config.copy()
    if "hydra" in config:
        with open_dict(config):
            del config["hydra"]
    problems = [*strangers(config, root, list(default_choices())), *missing(config)]
    if problems:
        raise refusal(problems)
    try:
        OmegaConf.resolve(config)
        if OmegaConf.get_type(config) is not root:
            config = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(root), config))
        return OmegaConf.to_object(config)
    except Exception as error:
        if is_config_trouble(error):
            raise translate(error, list(leaves(root))) from error
        raise


def through_the_door(
    config: DictConfig, registry: Registry, folder: Path, overrides: Sequence[str] = ()
) -> tuple[Any, Translation | None]:
    """The plain config of a job, checked, and the report on the DeepSpeed config that it takes in, if it names one.

    `run.dir` becomes the job's folder, `plugins.block` what is really blocked. overrides: the command line.
    """
    root = root_type(registry)
    OmegaConf.update(config, "run.dir", str(folder))
    plain = to_objects(config, root)
    plain.plugins.block = list(registry.blocked)
    chosen = keys_by_option(overrides, GlobalHydra.instance().config_loader()) if plain.deepspeed else {}
    translation = apply(plain, registry, overrides, chosen)
    problems = check_config(plain, registry.slots())
    if problems:
        raise refusal(problems)
    return plain, translation


def compose_config(overrides: Sequence[str] = (), config_name: str = "config") -> tuple[Any, JobInfo]:
    """(Config, JobInfo) without a Hydra application: nothing is written, no logging is set up. Raises ConfigError."""
    registry = registry_for(tuple(block_from_argv(list(overrides))))
    root = prepare(registry)
    command = Command({}, tuple(overrides))
    refuse_mistakes(command, root, config_name, registry)
    with _hydra(None), translated(root):
        composed = compose(config_name, [*overrides, *without_blocked(root, overrides)], return_hydra_config=True)
        hydra = composed.hydra
        folder = Path(composed.run.dir).absolute()
        config, translation = through_the_door(composed, registry, folder, overrides)
        return config, job_info(config, hydra, multirun=False, folder=folder, translation=translation)


@contextmanager
def translated(root: type) -> Iterator[None]:
    """Errors of Hydra and OmegaConf become a ConfigError."""
    try:
        yield
    except Exception as error:
        if is_config_trouble(error):
            raise translate(error, list(leaves(root))) from error
        raise


# ------------------------------------------------------------------ the application


def hydra_main(
    job: Job, config_name: str = "config", argv: Sequence[str] | None = None, *, app: str = "train", folder: bool = True
) -> int:
    """Run `job` through Hydra for a command line (default: this process's); returns the exit status, and prints errors.

    folder: whether jobs have a folder; without one nothing is written.
    """
    from partita.config.app import run_app

    return run_app(job, config_name, argv, app=app, folder=folder)


def ready_command(argv: Sequence[str], config_name: str, app: str, folder: bool) -> tuple[Command, Registry]:
    """The command as Hydra gets it. Raises ConfigError and PluginError."""
    command = parse_command(argv)
    config_name = command.flags.get("config_name") or config_name
    registry = registry_for(tuple(block_from_argv(list(argv))))
    root = prepare(registry, command.flags.get("config_dir"))
    if command.completes:
        return command, registry
    refuse_mistakes(command, root, config_name, registry)
    command = replace(command, overrides=(*command.overrides, *without_blocked(root, command.overrides)))
    rank = joined_rank()
    if command.runs and folder:
        if rank is not None:
            command = joined_additions(command, rank)
        elif command.multirun:
            command = sweep_additions(app, command)
    elif command.runs:
        nowhere = ("hydra.run.dir=.", "hydra.output_subdir=null")
        command = replace(command, overrides=(*command.overrides, *nowhere))
    return command, registry
