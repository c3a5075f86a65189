"""A short run of the script that feeds damaged files to every reader (by hand for longer: docs/checkpoints.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_damaged_files_cost_clean_errors_only() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "fuzz.py"), "--seconds", "8", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    for reader in ("checkpoint", "foreign", "tokens", "config", "metrics"):
        assert f"{reader} " in done.stdout
