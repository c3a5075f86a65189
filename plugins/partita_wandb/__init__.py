"""Logs runs and sweeps to Weights & Biases."""

from partita_wandb.config import TrackerConfig
from partita_wandb.strategy import (
    partita_check,
    partita_config,
    partita_decide,
    partita_evaluate,
    partita_failure,
    partita_run_end,
    partita_run_start,
    partita_slots,
    partita_step_end,
)

partita_api = 1

__all__ = [
    "TrackerConfig",
    "partita_api",
    "partita_check",
    "partita_config",
    "partita_decide",
    "partita_evaluate",
    "partita_failure",
    "partita_run_end",
    "partita_run_start",
    "partita_slots",
    "partita_step_end",
]
