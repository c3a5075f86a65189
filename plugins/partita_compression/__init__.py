"""Chooses what gradients and weights look like on the wire, and carries it out."""

from partita_compression.config import CompressionConfig
from partita_compression.strategy import (
    partita_check,
    partita_config,
    partita_decide,
    partita_estimate,
    partita_provide,
    partita_slots,
)

partita_api = 1

__all__ = [
    "CompressionConfig",
    "partita_api",
    "partita_check",
    "partita_config",
    "partita_decide",
    "partita_estimate",
    "partita_provide",
    "partita_slots",
]
