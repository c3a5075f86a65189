"""Schema of node `tracker`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    # wandb, none
    name: str = "wandb"
    project: str = "partita"
    # user or team; default: the key's own
    entity: str | None = None
    # auto (WANDB_MODE, else online where a key is configured, else offline), offline, online, disabled
    mode: str = "auto"
    # the run fails where W&B can't start; otherwise it goes on with a warning, and without W&B
    required: bool = False
    tags: list[str] = field(default_factory=list)
