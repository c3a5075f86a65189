"""Checkpoints move between layouts: each layout writes one that another reads (all pairs: scripts/bench/layouts.py)."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import layout_matrix

DENSE = ["one", "zero1 x2", "zero3 x4", "tensor 2", "pipeline x zero3 x2", "zero3 host", "hsdp 2x2", "zero3 x tensor"]
EXPERTS = ["moe one", "moe expert 2"]


@cache
def one_rank(name: str) -> list[float]:
    """Losses of one rank after the checkpoint, which those of all layouts are."""
    with TemporaryDirectory() as folder:
        losses = layout_matrix.write({**layout_matrix.DENSE, **layout_matrix.EXPERTS}[name], Path(folder))
    assert not isinstance(losses, str), losses
    return losses


@pytest.mark.parametrize(
    ("source", "target"),
    [*zip(DENSE, [*DENSE[1:], DENSE[0]], strict=True), *zip(EXPERTS, EXPERTS[::-1], strict=True)],
    ids=str,
)
def test_what_a_layout_saves_another_goes_on_from(source: str, target: str, tmp_path: Path) -> None:
    """Weights and moments equal to the bit, the next ten losses within 1e-5 of those of one rank."""
    known = {**layout_matrix.DENSE, **layout_matrix.EXPERTS}
    wrote = layout_matrix.write(known[source], tmp_path / "source", after=0)
    assert not isinstance(wrote, str), wrote
    expected = one_rank("moe one" if source in EXPERTS else "one")
    assert layout_matrix.move(known[target], tmp_path / "source", tmp_path / "target", expected) == []
