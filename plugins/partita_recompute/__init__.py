"""Recomputes activations in backward instead of keeping them."""

from partita_recompute.auto import partita_choices
from partita_recompute.config import RecomputeConfig
from partita_recompute.strategy import partita_check, partita_config, partita_decide, partita_transforms

partita_api = 1

__all__ = [
    "RecomputeConfig",
    "partita_api",
    "partita_check",
    "partita_choices",
    "partita_config",
    "partita_decide",
    "partita_transforms",
]
