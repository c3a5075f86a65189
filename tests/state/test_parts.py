"""Parts of global tensors: disjoint, complete, and the same elements in tensor space as in flat ranges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from partita.errors import PartitaError
from partita.state.parts import Part, declare
from partita.state.units import bind_parameters


@st.composite
def parts_of(draw: st.DrawFn) -> list[Part]:
    """All parts of a tensor, packed from a few blocks along one dimension."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim, degree = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    blocks = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    shape[dim] = sum(blocks)
    out = []
    for i in range(degree):
        starts = [sum(blocks[:k]) for k in range(len(blocks))]
        ranges = tuple((a + n * i // degree, a + n * (i + 1) // degree) for a, n in zip(starts, blocks))
        out.append(Part(tuple(shape), dim, ranges, ("tensor",)))
    return out


@st.composite
def twice_cut(draw: st.DrawFn) -> list[Part]:
    """All parts of a tensor that two axes cut along two dimensions, the second cut block by block."""
    shape = (
        draw(st.integers(1, 5)),
        *draw(st.lists(st.integers(1, 4), max_size=1)),
        2 * draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    (rows, outer), (columns, inner) = ((draw(st.integers(0, n - 1)), draw(st.integers(1, 3))) for n in (len(shape), len(shape)))
    if rows == columns:
        columns = (columns + 1) % len(shape)
    half = shape[columns] // 2
    out = []
    for i in range(outer):
        for j in range(inner):
            lo, hi = half * j // inner, half * (j + 1) // inner
            rest = shape[columns] - half
            blocks = ((lo, hi), (half + rest * j // inner, half + rest * (j + 1) // inner))
            first = ((shape[rows] * i // outer, shape[rows] * (i + 1) // outer),)
            out.append(Part(shape).cut(columns, blocks, ("tensor",)).cut(rows, first, ("shard",)))
    return out


@given(st.one_of(parts_of(), twice_cut()))
def test_parts_are_disjoint_and_make_the_whole(parts: list[Part]) -> None:
    whole = torch.arange(math.prod(parts[0].shape)).view(parts[0].shape)
    back = torch.full_like(whole, -1)
    for part in parts:
        local = part.take(whole)
        assert tuple(local.shape) == part.local
        part.put(local, back)
    assert sum(math.prod(p.local) for p in parts) == whole.numel() and torch.equal(back, whole)


@given(st.one_of(parts_of(), twice_cut()), st.floats(0, 1), st.floats(0, 1))
def test_runs_are_the_elements_of_a_flat_range(parts: list[Part], a: float, b: float) -> None:
    whole = torch.arange(math.prod(parts[0].shape)).view(parts[0].shape)
    for part in parts:
        local = part.take(whole).reshape(-1)
        lo, hi = sorted((int(a * local.numel()), int(b * local.numel())))
        found = [local.new_empty(0)]
        at = lo
        for first, to, count in part.runs(lo, hi):
            assert first == at and count > 0
            found.append(whole.view(-1)[to : to + count])
            at += count
        assert torch.equal(torch.cat(found), local[lo:hi])


def test_a_whole_parameter_is_one_run() -> None:
    assert list(Part((3, 4)).runs(2, 9)) == [(2, 2, 7)] and list(Part((3, 4)).runs(5, 5)) == []


def test_tied_modules_that_disagree_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    declare(model[0], "weight", Part((12, 4), 0, ((0, 6),), ("tensor",)))
    assert bind_parameters(model)[0].part.shape == (12, 4)  # one declaration is enough
    declare(model[1], "weight", Part((12, 4), 0, ((6, 12),), ("tensor",)))
    with pytest.raises(PartitaError, match="different parts"):
        bind_parameters(model)


def test_a_declaration_must_fit_the_parameter() -> None:
    model = nn.Linear(4, 6)
    declare(model, "weight", Part((12, 4), 0, ((0, 5),), ("tensor",)))
    with pytest.raises(PartitaError, match=r"declared to be a part of shape \(5, 4\)"):
        bind_parameters(model)
