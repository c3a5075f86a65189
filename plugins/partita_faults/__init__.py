"""Faults on purpose: to see that a run survives them, and that they are named rightly."""

from partita_faults.config import FaultsConfig
from partita_faults.strategy import (
    partita_check,
    partita_config,
    partita_decide,
    partita_run_end,
    partita_run_start,
    partita_step_end,
    partita_step_start,
)

partita_api = 1

__all__ = [
    "FaultsConfig",
    "partita_api",
    "partita_check",
    "partita_config",
    "partita_decide",
    "partita_run_end",
    "partita_run_start",
    "partita_step_end",
    "partita_step_start",
]
