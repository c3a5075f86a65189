"""One contiguous part of one state tensor: what a checkpoint saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Term(NamedTuple):
    """Elements [lo, hi) of the stored 1-D tensor `key`, to be added from element `at` of a slice's data on."""

    key: str
    lo: int
    hi: int
    at: int


@dataclass(frozen=True)
class StateSlice:
    """Elements [lo, hi) in row-major order of the tensor `key` of `shape`.

    data: 1-D view of hi - lo elements; a load writes into it. key: `model.<parameter>`, `optimizer.<parameter>.<state>`, `buffer.<name>`,
    or `wire.<...>`, what whoever provides the collectives keeps. optional: a load goes on without it where the checkpoint has none of that shape.
    instead: from what a checkpoint of another layout has (key -> anything with a `shape`), what adds up to the data; None: it is
    to be zero.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lo: int
    hi: int
    data: torch.Tensor
    optional: bool = False
    instead: Callable[[Mapping[str, Any]], Sequence[Term] | None] | None = None
