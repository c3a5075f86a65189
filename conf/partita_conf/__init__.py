"""Hydra config tree of Partita, found as pkg://partita_conf."""
