"""Layouts against one rank (losses, gradient norms, evaluation over 20 updates), and checkpoints that move from layout to layout.

python scripts/bench/layouts.py                     # about 90 layouts; exit status 1 where one is off by more than 1e-5, fails or hangs
python scripts/bench/layouts.py --only zbv --steps 6
python scripts/bench/layouts.py --moves             # all changes of layout through a checkpoint: equal to the bit, the next ten losses
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("train", "parallel", "distributed")]

import combinations as cases  # type: ignore[import-not-found]  # noqa: E402
import layout_matrix  # type: ignore[import-not-found]  # noqa: E402
from layouts import reference  # type: ignore[import-not-found]  # noqa: E402
from pool import RankError  # type: ignore[import-not-found]  # noqa: E402

from partita.errors import PartitaError  # noqa: E402

BOUND = 1e-5
TOGETHER = 6  # layouts in one call of the ranks


def losses(only: str, steps: int, limit: float) -> int:
    """The table of all layouts whose name holds `only`; how many are wrong."""
    chosen = [c for c in cases.all_cases() if only in c.name]
    print(f"{'layout':44} {'losses':>9} {'norms':>9} {'eval':>9} {'seconds':>8}", flush=True)
    by_ranks: dict[int, list[cases.Case]] = {}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="partita_layouts_") as scratch:
        for case in chosen:
            try:
                ranks = cases.spec_of(Path(scratch) / "plan", *case.model, *case.layout).ranks
            except PartitaError as error:
                bad += 1
                print(f"{case.name:44} REFUSED: {str(error).splitlines()[0]}", flush=True)
                continue
            by_ranks.setdefault(ranks, []).append(case)
        for _, group in sorted(by_ranks.items()):
            for i in range(0, len(group), TOGETHER):
                bad += together(group[i : i + TOGETHER], Path(scratch), steps, limit)
    print(f"{len(chosen)} layouts, {bad} wrong")
    return bad


def together(group: list[cases.Case], scratch: Path, steps: int, limit: float) -> int:
    """Rows of some layouts with as many ranks; where they fail together, each by itself."""
    begun = time.perf_counter()
    try:
        found = cases.run_cases(group, scratch, steps, limit)
    except RankError as error:
        if len(group) > 1:
            return sum(together([case], scratch, steps, limit) for case in group)
        print(f"{group[0].name:44} FAILED: {str(error).strip().splitlines()[-1][:160]}\n{error}", flush=True)
        return 1
    seconds = (time.perf_counter() - begun) / len(group)
    bad = 0
    for case, got in zip(group, found, strict=True):
        worst = cases.off(got, reference(*case.model, steps=steps))
        wrong = not max(worst) <= BOUND  # a NaN is wrong, too
        bad += wrong
        figures = " ".join(f"{value:9.1e}" for value in worst)
        print(f"{case.name:44} {figures} {seconds:8.1f}{'  WRONG' if wrong else ''}", flush=True)
    return bad


def moves() -> int:
    """All changes within each family of layouts; how many are wrong."""
    with tempfile.TemporaryDirectory(prefix="partita_moves_") as scratch:
        results = [matrix(family, Path(scratch)) for family in (layout_matrix.DENSE, layout_matrix.EXPERTS)]
    made, bad = (sum(column) for column in zip(*results, strict=True))
    print(f"{made} changes of layout, {bad} wrong")
    return bad


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
    """One of the two tables; exit status 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moves", action="store_true", help="changes of layout through a checkpoint, in place of losses")
    parser.add_argument("--only", default="", help="layouts whose name holds this text")
    parser.add_argument("--steps", type=int, default=20, help="updates of each run")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a layout counts as hanging")
    arguments = parser.parse_args()
    return int(bool(moves() if arguments.moves else losses(arguments.only, arguments.steps, arguments.limit)))


if __name__ == "__main__":
    sys.exit(main())
