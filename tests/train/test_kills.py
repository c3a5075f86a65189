"""The script that kills runs at random works; with many kills it is run by hand (docs/checkpoints.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import commands

ROOT = Path(__file__).parents[2]


def test_a_few_random_kills() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "kills.py"), "--kills", "3", "--full", "0.34", "--seed", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT, env=commands.environment(), check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "3 kills" in done.stdout
    assert "0 violations" in done.stdout
