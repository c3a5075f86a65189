"""The interpreter's checks find planted mistakes, and its roundings are those of hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from bfloat16 import round_to_bfloat16

from partita_kernels.jit import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def copy_without_mask(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@kernel
def all_store_the_same(y_ptr):
    tl.store(y_ptr, tl.program_id(0))


@kernel
def overflow(y_ptr, n):
    tl.store(y_ptr, tl.program_id(0) + n * n)


def test_accesses_outside_are_found(device):
    buffer = torch.zeros(64)
    copy_without_mask[(1,)](buffer[:32], buffer[32:], BLOCK=32)
    with pytest.raises(Exception, match="load outside"):
        copy_without_mask[(1,)](buffer[:31], buffer[32:], BLOCK=32)
    with pytest.raises(Exception, match="store outside"):
        copy_without_mask[(1,)](buffer[:32], torch.zeros(31), BLOCK=32)


def test_races_are_found(device):
    all_store_the_same[(1,)](torch.zeros(1, dtype=torch.int32))
    with pytest.raises(Exception, match="race"):
        all_store_the_same[(2,)](torch.zeros(1, dtype=torch.int32))


def test_int32_overflow_is_found(device):
    with pytest.raises(Exception, match="overflow"):
        overflow[(1,)](torch.zeros(1, dtype=torch.int64), 1 << 20)


def test_rounding():
    bits = np.random.default_rng().integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.array([3.4e38, np.nan, np.inf, -0.0, 1e-40], np.float32)])
    want = torch.from_numpy(x).bfloat16()
    got = torch.from_numpy(round_to_bfloat16(x).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])
