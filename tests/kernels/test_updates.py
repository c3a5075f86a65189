"""Optimizer updates and the squared norm against float64 and torch.optim: formats, empty ranges, skipping, bad numbers.

Run on whatever conftest.py sets up: CPU paths and plain torch, Triton's interpreter, or an accelerator.
"""

from __future__ import annotations

import pytest
import torch
from numbers64 import BF16, F16, F32, error
from updates import adam_run, sgd_once, sgd_run

import partita_kernels as kernels

SIZES = [0, 1, 15, 5000]


def close(got, want, bound=5e-7):
    """Weights and states of a run, over all ranges."""
    for mine, exact in zip([got.params, *got.states], [want.params, *want.states], strict=True):
        assert error(torch.cat(mine).cpu(), torch.cat(exact)) < bound


def copies_are_rounded_weights(run):
    assert all(c is None or torch.equal(c, p.to(c.dtype)) for c, p in zip(run.copies, run.params))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("copy_dtype", [None, BF16, F16])
@pytest.mark.parametrize("grad_dtype", [F32, BF16, F16])
def test_adamw_against_float64(grad_dtype, copy_dtype, decoupled, device, fresh_seed):
    got = adam_run(SIZES, grad_dtype, copy_dtype, decoupled=decoupled, seed=fresh_seed, device=device)
    copies_are_rounded_weights(got)
    with kernels.using("reference"):
        close(got, adam_run(SIZES, grad_dtype, None, decoupled=decoupled, dtype=torch.float64, seed=fresh_seed))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("formats", [(F32, None), (BF16, BF16), (F16, None), (F32, F16)])
def test_sgd_against_float64(formats, momentum, nesterov, device, fresh_seed):
    got = sgd_run(SIZES, *formats, momentum=momentum, nesterov=nesterov, seed=fresh_seed, device=device)
    copies_are_rounded_weights(got)
    with kernels.using("reference"):
        close(got, sgd_run(SIZES, formats[0], None, momentum=momentum, nesterov=nesterov, dtype=torch.float64, seed=fresh_seed))


@pytest.mark.parametrize("formats", [(F32, None), (BF16, BF16)])
@pytest.mark.parametrize("run", [adam_run, sgd_run])
def test_skip_changes_nothing(run, formats, device):
    start = run([100], *formats, steps=0, device=device)
    held = run([100], *formats, skip=torch.tensor(1.0, device=device), device=device)
    moved = run([100], *formats, skip=torch.tensor(0.0, device=device), device=device)
    assert torch.equal(start.params[0], held.params[0])
    assert torch.equal(start.states[0][0], held.states[0][0])
    assert not torch.equal(start.params[0], moved.params[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradients_reach_weights_and_copies(bad, device):
    p, m, v = (torch.zeros(40, device=device) for _ in range(3))
    g, c = torch.ones(40, dtype=BF16, device=device), torch.zeros(40, dtype=BF16, device=device)
    g[[3, 37]] = bad
    kernels.adamw_(
        [p], [g], [m], [v], copies=[c], step=1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0,
        scale=torch.ones((), device=device),
    )  # fmt: skip
    assert p.isnan().nonzero().flatten().tolist() == [3, 37]
    assert c.isnan().nonzero().flatten().tolist() == [3, 37]


def test_lengths_that_differ_are_refused(device):
    with pytest.raises(ValueError, match="range 0"):
        sgd_once(torch.zeros(2, device=device), torch.zeros(1, device=device))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_squared_norm(dtype, device, small_blocks):
    small_blocks("squares", 1024)
    tensors = [(torch.randn(n) * 3).to(dtype).to(device) for n in (0, 1, 30_003, 4097)]
    want = sum(t.double().square().sum() for t in tensors)
    assert abs(kernels.squared_norm(tensors).item() / want.item() - 1) < 1e-6


def test_squared_norm_of_nothing(device):
    assert kernels.squared_norm([]).item() == 0
    assert kernels.squared_norm([torch.zeros(0, device=device)]).item() == 0


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_squared_norm_of_bad_numbers(dtype, device):
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(20_000, dtype=dtype, device=device)
        x[15_000] = bad
        assert not kernels.squared_norm([torch.ones(5, dtype=dtype, device=device), x]).isfinite()
