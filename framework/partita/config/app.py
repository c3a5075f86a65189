"""The Hydra application: single runs and sweeps, with exit status and messages of ours."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from partita.config.command import Command
from partita.config.compose import PACKAGE, VERSION_BASE, prepare, ready_command, registry_for, through_the_door, translated
from partita.config.job import JobInfo, job_info
from partita.config.summary import Outcome, finished, outcomes, show_summary
from partita.errors import EXIT_DONE, EXIT_FAILED, PartitaError, RunInterrupted

log = logging.getLogger("partita")


class StopSweep(BaseException):
    """Ends a sweep after a signal. Hydra's launchers would take an Exception for one failed job and start the next."""

    def __init__(self, cause: RunInterrupted) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass
class Task:
    """What Hydra calls for each job, in this process or in one that a launcher started (so it is picklable)."""

    job: Callable[[Any, JobInfo], Any]
    blocked: tuple[str, ...]
    folder: bool
    started: float = field(default_factory=time.time)
    failure: BaseException | None = None
    result: Any = None

    def __call__(self, config: Any) -> Any:
        """Compose -> plain -> job. Returns the job's objective for sweepers that want one."""
        hydra_config = HydraConfig.get()
        multirun = hydra_config.mode == RunMode.MULTIRUN
        folder = Path(hydra_config.runtime.output_dir if self.folder else str(config.run.dir)).absolute()
        if not multirun:
            with self._kept():
                self.result = self._run(config, hydra_config, multirun, folder)
            return None
        return self._job_of_sweep(config, hydra_config, folder)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an error for `run_app`: Hydra would print lines of its own above it."""
        try:
            yield
        except Exception as error:
            self.failure = error

    def _run(self, config: Any, hydra_config: Any, multirun: bool, folder: Path) -> Any:
        registry = registry_for(self.blocked)
        root = prepare(registry)
        with translated(root):
            typed = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)  # `x=${y}` is text there
            plain, translation = through_the_door(config, registry, folder, [str(o) for o in cast(list[str], typed)])
            info = job_info(plain, hydra_config, multirun=multirun, folder=folder, translation=translation)
        logging.getLogger().setLevel(plain.launch.log_level.upper())
        return self.job(plain, info)

    def _job_of_sweep(self, config: Any, hydra_config: Any, folder: Path) -> Any:
        number, name = int(hydra_config.job.num), folder.name
        if self.folder and not config.run.redo and (before := finished(folder)):
            log.info("job %d (%s) is done already; run.redo=true runs it again", number, name)
            return before.objective
        started = time.perf_counter()
        outcome = Outcome(number, name, overrides=list(hydra_config.overrides.task))
        try:
            result = self._run(config, hydra_config, True, folder)
            outcome = outcome.done(result)
        except Exception as error:
            outcome = outcome.failed(error)
            report(error, f"job {number} ({name}) failed")
            if isinstance(error, RunInterrupted):
                raise StopSweep(error) from error
            if not hydra_config.sweeper._target_.endswith("BasicSweeper"):
                raise  # a sweeper that optimizes must hear of it
        finally:
            if self.folder:
                replace(outcome, seconds=time.perf_counter() - started).write(folder)
        return outcome.objective


def report(error: BaseException, before: str = "") -> None:
    """Print an error for people: ours as they are ($PARTITA_FULL_ERROR=1: with traceback), others with their traceback."""
    sys.stdout.flush()
    head = f"partita: {before}: " if before else "partita: "
    if isinstance(error, PartitaError) and os.environ.get("PARTITA_FULL_ERROR") != "1":
        print(f"{head}{_heading(error)}{error}", file=sys.stderr, flush=True)
        return
    if before:
        print(head.rstrip(": "), file=sys.stderr)
    traceback.print_exception(error)


def _heading(error: PartitaError) -> str:
    from partita.errors import EXIT_CONFIG

    return "the config can't be used\n" if error.exit_status == EXIT_CONFIG else ""


def run_app(job: Callable[[Any, JobInfo], Any], config_name: str, argv: Sequence[str] | None, *, app: str, folder: bool) -> int:
    """See `compose.hydra_main`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with contextlib.ExitStack() as stack:
            command, registry = ready_command(argv, config_name, app, folder)
            if not folder and command.multirun:
                nowhere = stack.enter_context(tempfile.TemporaryDirectory())
                command = replace(command, overrides=(*command.overrides, f"hydra.sweep.dir={nowhere}"))
            task = Task(job, registry.blocked, folder)
            return _run(task, command, config_name, app)
    except (PartitaError, StopSweep) as error:
        if isinstance(error, PartitaError):
            report(error)
            return error.exit_status
        return error.cause.exit_status


def _run(task: Task, command: Command, config_name: str, app: str) -> int:
    root = prepare(registry_for(task.blocked), command.flags.get("config_dir"))
    try:
        with _command_line(command, app), translated(root):
            hydra.main(config_path=f"pkg://{PACKAGE}", config_name=config_name, version_base=VERSION_BASE)(task)()
    finally:
        failed = _end_of_sweep(task, command)
    if task.failure is not None:
        report(task.failure)
        return task.failure.exit_status if isinstance(task.failure, PartitaError) else EXIT_FAILED
    return EXIT_FAILED if failed else EXIT_DONE


def _end_of_sweep(task: Task, command: Command) -> bool:
    """Show the table of jobs; tells whether one failed."""
    if not (command.multirun and command.runs and task.folder):
        return False
    folder = sweep_dir(command)
    found = outcomes(folder, since=task.started)
    show_summary(found, folder)
    return any(o.status != "done" for o in found)


def sweep_dir(command: Command) -> Path:
    """The sweep's folder of a ready command."""
    from partita.config.command import parse_overrides

    given = {o.key_or_group: o for o in parse_overrides(command.overrides)}
    return Path(str(given["hydra.sweep.dir"].value())).absolute()


@contextlib.contextmanager
def _command_line(command: Command, app: str) -> Iterator[None]:
    """Hydra reads sys.argv, and raises instead of ending the process where HYDRA_FULL_ERROR is set."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0] if before else app, *command.argv()]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
