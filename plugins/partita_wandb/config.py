"""Schema of node `tracker`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    name: str = "wandb"  # wandb, none
    project: str = "partita"
    entity: str | None = None  # user or team; default: the key's own
    mode: str = "auto"  # auto (online where a key is configured, else offline), offline, online, disabled
    tags: list[str] = field(default_factory=list)
