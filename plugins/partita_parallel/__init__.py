"""Lays the ranks out on a mesh, and works a global batch through it."""

from partita_parallel.auto import partita_choices
from partita_parallel.config import ParallelConfig
from partita_parallel.estimate import partita_estimate
from partita_parallel.pipeline import partita_provide, partita_slots
from partita_parallel.strategy import partita_check, partita_config, partita_decide
from partita_parallel.transforms import partita_transforms

partita_api = 1

__all__ = [
    "ParallelConfig",
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
