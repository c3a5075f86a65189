"""Which W&B run a job belongs to: the id is kept in the run's folder, so a resumed run goes on in the same one."""

from __future__ import annotations

import json
import os
import secrets
import string
from dataclasses import asdict, dataclass
from pathlib import Path

from partita.errors import ConfigError

FILE = "wandb_id.json"
LETTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class Identity:
    """id: of the W&B run. attempt: how often the job was started before in this folder."""

    id: str
    attempt: int = 0


def identify(folder: Path, multirun: bool) -> Identity:
    """The id that the folder has, or a new one. WANDB_RUN_ID (the agent of a W&B sweep sets it) wins in a single run.

    Raises ConfigError in a multirun with WANDB_RUN_ID: all its jobs would write into one W&B run.
    """
    given = os.environ.get("WANDB_RUN_ID")
    if given and multirun:
        raise ConfigError(
            f"WANDB_RUN_ID={given} is set, and this is a multirun (-m): all its jobs would write into that one W&B run\n"
            "    -> unset WANDB_RUN_ID; each job gets a W&B run of its own, and the sweep is their group"
        )
    path = folder / FILE
    known = Identity(**json.loads(path.read_text())) if path.exists() else None
    if known and given in (None, known.id):
        mine = Identity(known.id, known.attempt + 1)
    else:
        mine = Identity(given or "".join(secrets.choice(LETTERS) for _ in range(8)))
    part = path.with_suffix(".partial")
    part.write_text(json.dumps(asdict(mine)))
    os.replace(part, path)
    return mine
