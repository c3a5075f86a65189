"""Chooses what gradients and weights look like on the wire, and carries it out."""

from partita_compression.auto import partita_choices
from partita_compression.config import CompressionConfig, LocalConfig
from partita_compression.strategy import (
    partita_check,
    partita_config,
    partita_decide,
    partita_estimate,
    partita_provide,
    partita_run_start,
    partita_slots,
    partita_step_end,
)

partita_api = 1

__all__ = [
    "CompressionConfig",
    "LocalConfig",
    "partita_api",
    "partita_check",
    "partita_choices",
    "partita_config",
    "partita_decide",
    "partita_estimate",
    "partita_provide",
    "partita_run_start",
    "partita_slots",
    "partita_step_end",
]
