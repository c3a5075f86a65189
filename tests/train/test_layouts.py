"""Checkpoints move between layouts: each layout writes one that another reads (all pairs: scripts/bench/layouts.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import layout_matrix

DENSE = ["one", "zero1 x2", "zero3 x4", "tensor 2", "hsdp 2x2", "zero3 x tensor"]
EXPERTS = ["moe one", "moe expert 2"]


@pytest.mark.parametrize(
    ("source", "target"),
    [*zip(DENSE, [*DENSE[1:], DENSE[0]], strict=True), *zip(EXPERTS, EXPERTS[::-1], strict=True)],
    ids=str,
)
def test_what_a_layout_saves_another_goes_on_from(source: str, target: str, tmp_path: Path) -> None:
    """Weights and moments equal to the bit, the next ten losses within 1e-5."""
    known = {**layout_matrix.DENSE, **layout_matrix.EXPERTS}
    losses = layout_matrix.write(known[source], tmp_path / "source")
    assert not isinstance(losses, str), losses
    assert layout_matrix.move(known[target], tmp_path / "source", tmp_path / "target", losses) == []
