"""All changes of layout through a checkpoint: weights and moments equal to the bit, the next ten losses within 1e-5.

python scripts/bench/layouts.py            # a matrix; exit status 1 where a change is wrong
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "train"), str(ROOT / "tests" / "distributed")]

import layout_matrix  # type: ignore[import-not-found]  # noqa: E402


def matrix(family: dict[str, tuple[str, ...]], scratch: Path) -> tuple[int, int]:
    """(changes made, changes that were wrong) of all pairs of a family; layouts that this version refuses are named and left out."""
    expected = {}
    for name, overrides in family.items():
        found = layout_matrix.write(overrides, scratch / name)
        if isinstance(found, str):
            print(f"{name}: refused: {found}", flush=True)
        else:
            expected[name] = found
    made = bad = 0
    for source in expected:
        row = []
        for target in expected:
            wrong = layout_matrix.move(family[target], scratch / source, scratch / f"{source} to {target}", expected[source])
            made, bad = made + (source != target), bad + bool(wrong)
            row.append("equal" if not wrong else f"WRONG ({'; '.join(wrong[:3])})")
        print(f"{source:22s} -> " + ", ".join(f"{t}: {r}" for t, r in zip(expected, row, strict=True)), flush=True)
    return made, bad


def main() -> int:
    """Both families."""
    with tempfile.TemporaryDirectory(prefix="partita_layouts_") as scratch:
        results = [matrix(family, Path(scratch)) for family in (layout_matrix.DENSE, layout_matrix.EXPERTS)]
    made, bad = (sum(column) for column in zip(*results, strict=True))
    print(f"{made} changes of layout, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
