"""What the plain rules share: walking over an update in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from partita.state.optimizers import Update

PIECE = 1 << 16  # elements at a time; a multiple of every block


class Piece(NamedTuple):
    """Elements that belong together. g: the scaled gradient, float32 and free to be overwritten. states: in the order of the names."""

    p: Any
    g: Any
    states: tuple[Any, ...]
    copy: torch.Tensor | None
    range: int
    start: int


def pieces(update: Update, names: tuple[str, ...], scale: torch.Tensor) -> Iterator[Piece]:
    """All elements of an update. After each piece the caller's changes of p are written to the low-precision copy."""
    states = [update.states[name] for name in names]
    for i, (p, g, copy) in enumerate(zip(update.master, update.gradients, update.copies, strict=True)):
        for start in range(0, p.numel(), PIECE):
            at = slice(start, start + PIECE)
            piece = Piece(
                p[at], g[at].float() * scale, tuple(s[i][at] for s in states), None if copy is None else copy[at], i, start
            )
            yield piece
            if piece.copy is not None:
                piece.copy.copy_(piece.p)
