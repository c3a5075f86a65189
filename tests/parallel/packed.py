"""Several calls of one function in one start of the ranks: groups of processes are made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def packed(rank: int, world: int, fn: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What `fn(rank, world, *arguments)` returns for the arguments of each call. fn: of a module that ranks can import by its name."""
    return [fn(rank, world, *arguments) for arguments in calls]
