"""Attention with its log-sum-exp against float64 and a mask made pair by pair: causal, windows, documents, shared heads, pieces of a ring."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest
import torch
from numbers64 import BF16, BOUNDS, F16, F32, compare, error, fresh

from partita_kernels import attention, attention_piece, attention_piece_backward, flash_triton, tuning, visible
from partita_kernels.jit import backend

SETTING = os.environ.get("PARTITA_KERNEL_TESTS", "")
# Positions of queries and keys, and what limits what they see.
KINDS = {
    "all": (range(19), range(35), {"causal": False}),
    "causal": (range(37), range(37), {}),
    "causal, later queries": (range(20, 40), range(31), {}),
    "window": (range(33), range(33), {"window": 5}),
    "window both ways": (range(17), range(17), {"causal": False, "window": 3}),
    "documents": (range(40), range(40), {"documents": [0, 7, 7, 20, 33]}),  # the last tokens are padding
    "documents both ways": (range(25), range(25), {"causal": False, "documents": [0, 3, 25]}),
    "ring": ([*range(8), *range(24, 32)], [*range(8, 16), *range(16, 24)], {"documents": [0, 11, 32]}),
    "nothing": (range(5), range(7, 12), {}),
}


def pairs(kind):
    """Bool [T, S]: may query i see key j?"""
    queries, keys, limits = KINDS[kind]
    documents = limits.get("documents", [0, 1 << 30])

    def may(i, j):
        window = limits.get("window", 1 << 30)
        causal = limits.get("causal", True)
        together = any(a <= i < b and a <= j < b for a, b in pairwise(documents))
        return together and i - j < window and (j <= i if causal else j - i < window)

    return torch.tensor([[may(i, j) for j in keys] for i in queries])


def bounds(kind, device):
    queries, keys, limits = KINDS[kind]
    limits = dict(limits)
    if "documents" in limits:
        limits["documents"] = torch.tensor(limits["documents"], device=device)
    return visible(torch.tensor([*queries], device=device), torch.tensor([*keys], device=device), **limits)


def attention64(q, k, v, seen, scale=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    some = seen.any(1)[:, None]
    scores = scores.masked_fill(~seen & some, -torch.inf)
    return (scores.softmax(-1) @ v) * some, scores.logsumexp(-1).masked_fill(~some[:, 0], -torch.inf)


@pytest.mark.parametrize(
    ("kind", "heads", "size", "dtype"),
    [
        ("all", (2, 2), 8, F32), ("causal", (4, 2), 16, F32), ("causal", (2, 1), 24, BF16), ("causal, later queries", (2, 2), 5, F32),
        ("window", (3, 1), 16, F16), ("window both ways", (2, 2), 16, F32), ("documents", (2, 1), 16, F32), ("documents", (2, 2), 16, BF16),
        ("documents both ways", (1, 1), 20, F32), ("ring", (2, 2), 16, F32), ("nothing", (2, 1), 8, F32),
    ],
)  # fmt: skip
def test_attention(kind, heads, size, dtype, device, small_blocks):
    small_blocks("flash_triton", (16, 16), "tiles")
    seen, (low, high) = pairs(kind).to(device), bounds(kind, device)
    j = torch.arange(seen.shape[1], device=device)
    assert torch.equal((j >= low[0, :, None]) & (j < high[0, :, None]), seen)
    q, k, v = (
        fresh((1, t, h, size), dtype, device)
        for t, h in ((seen.shape[0], heads[0]), (seen.shape[1], heads[1]), (seen.shape[1], heads[1]))
    )

    def ours(q, k, v):
        return attention(*(t.transpose(1, 2) for t in (q, k, v)), low, high, 0.3)

    def exact(q, k, v):
        return attention64(*(t.transpose(1, 2) for t in (q, k, v)), seen, 0.3)

    bound = BOUNDS[dtype] * (1.5 if dtype == F32 else 3)  # scores and weights are rounded, too
    compare(ours, exact, [q, k, v], bound)
    if SETTING != "interpreter":  # where it is the same path
        compare(lambda *t: ours(*t)[0], lambda *t: exact(*t)[0], [q, k, v], bound)  # without a gradient of the log-sum-exp


def test_bounds_of_each_row(device, small_blocks):
    small_blocks("flash_triton", (16, 16), "tiles")
    ends = torch.tensor([[3] * 20, [*range(1, 21)]], device=device, dtype=torch.int32)
    low = torch.zeros_like(ends)
    q, k, v = (fresh((2, 2, 20, 8), F32, device) for _ in range(3))
    out, lse = attention(q, k, v, low, ends)
    for b in range(2):
        seen = torch.arange(20, device=device) < ends[b, :, None]
        want, sums = attention64(*(t[b : b + 1].double() for t in (q, k, v)), seen)
        assert error(out[b : b + 1], want) < 2e-6
        assert error(lse[b : b + 1], sums) < 2e-6


def test_pieces_make_up_the_whole(device, small_blocks):
    """As in a ring: keys in two pieces, merged by their log-sum-exps; backward of each from what all keys gave."""
    small_blocks("flash_triton", (16, 16), "tiles")
    q, k, v = (fresh((1, 2, 24, 8), F32, device) for _ in range(3))
    at = torch.arange(24, device=device)
    cuts = [(slice(a, b), visible(at, at[a:b])) for a, b in ((0, 11), (11, 24))]
    pieces = [attention_piece(q, k[:, :, s], v[:, :, s], *b) for s, b in cuts]
    lse = torch.logaddexp(pieces[0][1], pieces[1][1])
    out = sum(o * (z - lse).exp()[..., None] for o, z in pieces)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want, sums = attention64(*exact, torch.ones(24, 24, dtype=torch.bool, device=device).tril())
    assert error(out, want) < 2e-6
    assert error(lse, sums) < 2e-6
    dout = fresh(out.shape, F32, device)
    grads = torch.autograd.grad(want, exact, dout.double())
    got = [attention_piece_backward(dout, q, k[:, :, s], v[:, :, s], out, lse, *b) for s, b in cuts]
    assert error(got[0][0] + got[1][0], grads[0]) < 3e-6
    for i in (1, 2):
        assert error(torch.cat([g[i] for g in got], 2), grads[i]) < 3e-6


def test_tiles_are_tuned_once_and_kept(device, tmp_path, monkeypatch):
    """Each pass by itself; afterwards results are the same to the bit, and within rounding those of the default."""
    if SETTING not in ("interpreter", "device"):
        pytest.skip("Triton's launchers alone have tiles")
    monkeypatch.setenv("PARTITA_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "REPEAT", 1)
    few = {name: tiles[-1:] for name, tiles in flash_triton.CANDIDATES.items()}
    monkeypatch.setattr(flash_triton, "CANDIDATES", few)
    at = torch.arange(70, device=device)
    q, k, v, dout = (fresh((1, 1, 70, 16), F16, device) for _ in range(4))

    def all_four():
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, *visible(at, at))[0]
        return [out, *torch.autograd.grad(out, leaves, dout)]

    default = all_four()
    with tuning.tuning("tune"):
        first, again = all_four(), all_four()
    with tuning.tuning("tuned"):
        later = all_four()
    (kept,) = json.loads(tuning.path().read_text()).values()
    assert sorted(kept) == [f"attention_{name} float16 128x128x16" for name in sorted(few)]
    for name, tiles in few.items():
        assert tuple(kept[f"attention_{name} float16 128x128x16"]) in (flash_triton.TILES[backend()][name], *tiles)
    for a, b, c, d in zip(default, first, again, later):
        assert torch.equal(b, c)
        assert torch.equal(b, d)
        assert error(b, a.double()) < BOUNDS[F16]


def test_bad_numbers_reach_those_who_see_them(device):
    q, k, v = (fresh((1, 1, 6, 8), F32, device) for _ in range(3))
    v[0, 0, 3, 2] = torch.nan
    at = torch.arange(6, device=device)
    assert attention(q, k, v, *visible(at, at))[0][0, 0, 3:].isnan().any(-1).all()  # others too may multiply them by 0


def test_shapes_that_do_not_fit_are_refused(device):
    q, k = torch.zeros(1, 4, 6, 8, device=device), torch.zeros(1, 3, 6, 8, device=device)
    low = torch.zeros(1, 6, dtype=torch.int32, device=device)
    for bad in (
        (q, k, k, low, low),
        (q, q, q[:, :, :3], low, low),
        (q, q, q, low.long(), low.long()),
        (q, q, q, low[:, :3], low[:, :3]),
    ):
        with pytest.raises(ValueError, match="attention"):
            attention(*bad)
