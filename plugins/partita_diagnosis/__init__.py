"""Says in words what is wrong with a run: who hangs, who is slow, where numbers stop being finite, whose copy differs."""

from partita_diagnosis.config import DiagnosisConfig
from partita_diagnosis.strategy import (
    partita_check,
    partita_config,
    partita_failure,
    partita_run_end,
    partita_run_start,
    partita_step_end,
    partita_step_start,
)

partita_api = 1

__all__ = [
    "DiagnosisConfig",
    "partita_api",
    "partita_check",
    "partita_config",
    "partita_failure",
    "partita_run_end",
    "partita_run_start",
    "partita_step_end",
    "partita_step_start",
]
