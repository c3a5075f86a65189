"""Kernel tests in the ordinary pytest run: CPU paths. What needs Triton's interpreter or compiler has processes of its own."""

from __future__ import annotations

import os
import secrets

import pytest

# test_interpreter.py and test_compile.py start these with the environment they need.
collect_ignore = [] if os.environ.get("PARTITA_KERNEL_TESTS") else ["interpreter", "compiled"]


@pytest.fixture
def fresh_seed(record_property) -> int:
    """New at each run; shown with a failure (pytest prints fixture values) and kept in the report."""
    seed = int(os.environ.get("PARTITA_TEST_SEED") or secrets.randbelow(1 << 31))
    print(f"fresh_seed={seed} (PARTITA_TEST_SEED={seed} repeats it)")
    record_property("fresh_seed", seed)
    return seed
