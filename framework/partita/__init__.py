"""Partita: train large models by composing strategies in Hydra config."""

__version__ = "0.1.0"
