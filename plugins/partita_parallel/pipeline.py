"""Slot `executor`: one for each pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partita.plugin.markers import hookimpl
from partita_parallel.pipeline_order import STAGES


@hookimpl
def partita_slots() -> dict[str, Sequence[str]]:
    """An executor for each schedule."""
    return {"executor": tuple(STAGES)}


@hookimpl
def partita_provide(slot: str, name: str) -> Any:
    """The pipeline's executor."""
    if slot != "executor" or name not in STAGES:
        return None
    from partita_parallel.pipeline_run import make_pipeline

    return make_pipeline
