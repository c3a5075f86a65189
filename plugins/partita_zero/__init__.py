"""Cuts parameters, gradients and optimizer states over the data ranks."""

from partita_zero.auto import partita_choices
from partita_zero.config import ZeroConfig
from partita_zero.strategy import partita_check, partita_config, partita_decide

partita_api = 1

__all__ = ["ZeroConfig", "partita_api", "partita_check", "partita_choices", "partita_config", "partita_decide"]
