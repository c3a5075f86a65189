"""Checks that need a process of their own: Triton's interpreter and its compiler can't share one, nor be switched once it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", ["interpreter", "compile"])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton isn't installed")
def test_kernels_in(setting):
    env = {**os.environ, "PARTITA_KERNEL_TESTS": setting, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", str(HERE)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
