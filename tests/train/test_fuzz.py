"""A short run of the script that feeds damaged files to every reader (by hand for longer: docs/checkpoints.md)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import commands


def test_damaged_files_cost_clean_errors_only() -> None:
    done = commands.script("bench/fuzz.py", "--seconds", "6", "--seed", "1", timeout=120)
    for reader in ("checkpoint", "memory", "foreign", "tokens", "config", "metrics"):
        assert f"{reader} " in done.stdout
