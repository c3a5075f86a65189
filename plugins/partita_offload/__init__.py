"""Moves states to the memory of the host or to files."""

from partita_offload.auto import partita_choices
from partita_offload.config import OffloadConfig
from partita_offload.estimate import partita_estimate
from partita_offload.strategy import (
    partita_check,
    partita_config,
    partita_decide,
    partita_provide,
    partita_slots,
    partita_transforms,
)

partita_api = 1

__all__ = [
    "OffloadConfig",
    "partita_api",
    "partita_check",
    "partita_choices",
    "partita_config",
    "partita_decide",
    "partita_estimate",
    "partita_provide",
    "partita_slots",
    "partita_transforms",
]
