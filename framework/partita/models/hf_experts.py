"""Where the experts of a stacked weight lie in files that hold each expert by itself, as published checkpoints do."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

# transformers' name of the stack -> names of the matrices of one expert, put one below the other; Mixtral's, then everyone else's
PIECES = {"gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj")), "down_proj": (("w2",), ("down_proj",))}
Places = list[list[str]]
Read = Callable[[str], torch.Tensor]


def old_names(name: str) -> tuple[str, ...]:
    """A name, and the one that Mixtral's files have for it."""
    return (name, name.replace(".mlp.", ".block_sparse_moe.")) if ".mlp." in name else (name,)


def expert_places(names: tuple[str, ...], experts: int, stored: Container[str]) -> Places | None:
    """Stored names for each of `experts`: the matrices that make its slice of a stack that goes by any of `names`; None: not there."""
    for name in names:
        base, _, form = name.rpartition(".")
        for pieces in PIECES.get(form, ()):
            places = [[f"{base}.{e}.{piece}.weight" for piece in pieces] for e in range(experts)]
            if all(place in stored for expert in places for place in expert):
                return places
    return None


def read_experts(places: Places, read: Read) -> torch.Tensor:
    """The stack [experts, out, in] of those experts; each is read into its place, none is in memory twice."""
    out: torch.Tensor | None = None
    for e, expert in enumerate(places):
        at = 0
        for place in expert:
            piece = read(place)
            if out is None:
                out = piece.new_empty(len(places), len(expert) * piece.shape[0], piece.shape[1])
            out[e, at : at + len(piece)] = piece
            at += len(piece)
    assert out is not None
    return out
