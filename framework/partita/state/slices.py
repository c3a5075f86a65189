"""One contiguous part of one state tensor: what a checkpoint saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

OWN = "own."


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
    to be zero. own: a key that is read in place of `key` where a checkpoint has it: of states that differ among ranks which else share
    them. saved: False for what loads ask for and this save leaves out.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lo: int
    hi: int
    data: torch.Tensor
    optional: bool = False
    instead: Callable[[Mapping[str, Any]], Sequence[Term] | None] | None = None
    own: str | None = None
    saved: bool = True

    def found_in(self, stored: Container[str]) -> StateSlice:
        """The slice under the key that a checkpoint with the keys `stored` has for it."""
        return replace(self, key=self.own, own=None) if self.own is not None and self.own in stored else self


@dataclass(frozen=True)
class Apart:
    """Which of how many groups of ranks this one is in that each go their own way: their optimizer's states differ, and, where
    `weights`, their weights. A checkpoint has the first group's as those of all, and those of the others besides."""

    group: int = 0
    groups: int = 1
    weights: bool = False

    def own(self, key: str) -> str | None:
        """Under which this group's states are stored; None: under `key`."""
        return f"{OWN}{self.group}of{self.groups}.{key}" if self.group else None


def plain_key(key: str) -> str:
    """What a key of `Apart` is for."""
    return key.removeprefix(OWN).partition(".")[2] if key.startswith(OWN) else key
