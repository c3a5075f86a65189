"""Chooses the numbers that a run computes, keeps and sends."""

from partita_precision.config import PrecisionConfig
from partita_precision.strategy import partita_check, partita_config, partita_decide

partita_api = 1

__all__ = ["PrecisionConfig", "partita_api", "partita_check", "partita_config", "partita_decide"]
