"""The script that kills runs at random works; with many kills it is run by hand (docs/checkpoints.md)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import commands


def test_a_few_random_kills() -> None:
    done = commands.script("bench/kills.py", "--kills", "3", "--full", "0.34", "--seed", "4")
    assert "3 kills" in done.stdout
    assert "0 violations" in done.stdout
