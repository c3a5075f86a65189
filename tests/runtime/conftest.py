from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import programs


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., programs.Program]]:
    """Start toys; none outlives the test."""
    started: list[programs.Program] = []

    def make(entry: str, **options: Any) -> programs.Program:
        started.append(programs.toy(tmp_path / f"run{len(started)}", entry, **options))
        return started[-1]

    yield make
    for program in started:
        program.end()
