"""Launchers compiled for GPUs that aren't here: no spills, shared memory and registers within the limits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from compiling import CASES, F32, TARGETS, Use, compile_case, compile_only, empty, measure

from partita_kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl


# All targets in `make kernels` and with PARTITA_LONG_TESTS=1: a kernel takes a second or two for each.
CHECKED = list(TARGETS) if os.environ.get("PARTITA_LONG_TESTS") else ["sm_90"]


@pytest.mark.parametrize("target", CHECKED)
@pytest.mark.parametrize("case", CASES)
def test_fits(case, target):
    uses = compile_case(case, target)
    assert uses, "the launcher started no kernel"
    problems = [p for use in uses for p in use.problems()]
    assert not problems, problems


@kernel
def crowded(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x_ptr + at)
    b = tl.load(x_ptr + BLOCK + at)
    for i in range(n):
        a += b * tl.sum(a * b, 0)
        b += a * i
    tl.store(x_ptr + at, a + b)


def test_the_check_can_fail():
    """512 numbers for each thread, of 255 registers."""
    compiled = []
    with compile_only(TARGETS["sm_80"], compiled):
        crowded[(1,)](empty(1 << 20, dtype=F32), 100, BLOCK=8192, num_warps=1)
    assert any("spills" in p for p in measure("crowded", "sm_80", compiled[0][1]).problems())
    assert Use("k", "sm_80", 32, 0, 1 << 20, 4).problems()
