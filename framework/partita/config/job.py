"""What a job knows of itself besides its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.config.deepspeed.report import Translation


@dataclass(frozen=True)
class JobInfo:
    """Plain and picklable: it travels to the ranks.

    dir: the run's folder, absolute (the same as config.run.dir). overrides: what the user typed. choices: config group -> option.
    number: of the job in a sweep. sweep_dir, sweep_name: the folder that all jobs of the sweep share, and its name.
    translation: what became of the keys of a DeepSpeed config, where the job takes one in.
    """

    dir: Path
    name: str
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    multirun: bool = False
    number: int | None = None
    sweep_dir: Path | None = None
    sweep_name: str | None = None
    translation: Translation | None = None


def job_info(
    config: Any, hydra: Any, *, multirun: bool, folder: Path | None = None, translation: Translation | None = None
) -> JobInfo:
    """From the composed config and its `hydra` node. `folder`: the run's folder, where Hydra has not made it."""
    path = Path(folder if folder is not None else hydra.runtime.output_dir).absolute()
    sweep = Path(hydra.sweep.dir).absolute() if multirun else None
    choices = {group: str(option) for group, option in hydra.runtime.choices.items() if not group.startswith("hydra/")}
    return JobInfo(
        dir=path,
        name=config.run.name or path.name,
        overrides=tuple(o for o in hydra.overrides.task if not o.startswith("~")),
        choices=choices,
        multirun=multirun,
        number=int(hydra.job.num) if multirun else None,
        sweep_dir=sweep,
        sweep_name=sweep.name if sweep else None,
        translation=translation,
    )
