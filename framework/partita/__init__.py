"""Partita: train large models by composing strategies in Hydra config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.session import Session, StepResult, prepare

__version__ = "0.1.0"
__all__ = ["Session", "StepResult", "__version__", "prepare"]


def __getattr__(name: str) -> Any:
    """`partita.prepare` and its types; torch is imported when they are asked for, not before."""
    if name in ("prepare", "Session", "StepResult"):
        from partita import session

        return getattr(session, name)
    raise AttributeError(f"module 'partita' has no attribute {name!r}")
