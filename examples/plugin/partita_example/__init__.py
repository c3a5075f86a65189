"""Capped logits, an optimizer, a learning-rate schedule and a report: a plug-in that uses every family of hooks."""

from partita_example.config import ExampleConfig
from partita_example.report import partita_run_end, partita_run_start, partita_step_end
from partita_example.strategy import (
    partita_check,
    partita_config,
    partita_decide,
    partita_estimate,
    partita_provide,
    partita_slots,
    partita_transforms,
)

partita_api = 1

__all__ = [
    "ExampleConfig",
    "partita_api",
    "partita_check",
    "partita_config",
    "partita_decide",
    "partita_estimate",
    "partita_provide",
    "partita_run_end",
    "partita_run_start",
    "partita_slots",
    "partita_step_end",
    "partita_transforms",
]
