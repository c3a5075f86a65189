"""Low-rank adapters over a frozen base: LoRA, rsLoRA, DoRA."""

from partita_adapter.config import AdapterConfig
from partita_adapter.strategy import (
    partita_architecture,
    partita_check,
    partita_config,
    partita_export,
    partita_save,
    partita_transforms,
)

partita_api = 1

__all__ = [
    "AdapterConfig",
    "partita_api",
    "partita_architecture",
    "partita_check",
    "partita_config",
    "partita_export",
    "partita_save",
    "partita_transforms",
]
