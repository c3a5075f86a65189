"""Mixture of experts."""

from partita_moe.config import MoeConfig
from partita_moe.strategy import (
    partita_architecture,
    partita_check,
    partita_config,
    partita_estimate,
    partita_export,
    partita_gradients_ready,
    partita_run_end,
    partita_transforms,
)

partita_api = 1

__all__ = [
    "MoeConfig",
    "partita_api",
    "partita_architecture",
    "partita_check",
    "partita_config",
    "partita_estimate",
    "partita_export",
    "partita_gradients_ready",
    "partita_run_end",
    "partita_transforms",
]
