"""Optimizer updates on the CPU against float64 references and torch.optim; the C++ path, and life without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import partita_kernels as kernels
from partita_kernels import native

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [0, 1, 15, 40_000]


def adam_run(
    sizes, grad_dtype, copy_dtype, *, mode="auto", dtype=F32, decoupled=True, scale=0.7, skip=None, steps=3, seed=0, cut=None
):
    """Parameters, moments and copies after a few steps of fresh random gradients; cut: the size of pieces handed over."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    copies = [None if copy_dtype is None else torch.zeros(n, dtype=copy_dtype) for n in sizes]

    def pieces(tensors):
        return tensors if cut is None else [piece for t in tensors for piece in (t.split(cut) if t is not None else [None])]

    for step in range(1, steps + 1):
        grads = [torch.randn(n, generator=generator).to(grad_dtype) for n in sizes]
        with kernels.using(mode):
            kernels.adamw_(
                pieces(params), pieces(grads), pieces(first), pieces(second), copies=pieces(copies), step=step, lr=1e-2,
                beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled, scale=torch.tensor(scale), skip=skip,
            )  # fmt: skip
    return params, first, second, copies


def sgd_run(sizes, grad_dtype, copy_dtype, *, mode="auto", dtype=F32, momentum=0.9, nesterov=False, scale=0.7, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    buffers = [torch.zeros_like(p) for p in params] if momentum else None
    copies = [None if copy_dtype is None else torch.zeros(n, dtype=copy_dtype) for n in sizes]
    for _ in range(steps):
        grads = [torch.randn(n, generator=generator).to(grad_dtype) for n in sizes]
        with kernels.using(mode):
            kernels.sgd_(
                params, grads, buffers, copies=copies, lr=1e-2, momentum=momentum, nesterov=nesterov, weight_decay=0.1,
                scale=torch.tensor(scale),
            )  # fmt: skip
    return params, buffers or [], copies


def error(got, want):
    """Norm of the difference over the norm, of all tensors together."""
    a, b = torch.cat([t.double() for t in got]), torch.cat([t.double() for t in want])
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("mode", ["auto", "reference"])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("copy_dtype", [None, BF16, F16])
@pytest.mark.parametrize("grad_dtype", [F32, BF16, F16])
def test_adamw_against_float64(grad_dtype, copy_dtype, decoupled, mode, fresh_seed):
    got = adam_run(SIZES, grad_dtype, copy_dtype, decoupled=decoupled, mode=mode, seed=fresh_seed)
    want = adam_run(SIZES, grad_dtype, None, decoupled=decoupled, mode="reference", dtype=torch.float64, seed=fresh_seed)
    for mine, exact in zip(got[:3], want[:3]):
        assert error(mine, exact) < 5e-7
    if copy_dtype is not None:
        assert all(torch.equal(c, p.to(copy_dtype)) for c, p in zip(got[3], got[0]))


@pytest.mark.parametrize("mode", ["auto", "reference"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("formats", [(F32, None), (BF16, BF16), (F16, None), (F32, F16)])
def test_sgd_against_float64(formats, momentum, nesterov, mode, fresh_seed):
    got = sgd_run(SIZES, *formats, momentum=momentum, nesterov=nesterov, mode=mode, seed=fresh_seed)
    want = sgd_run(
        SIZES, formats[0], None, momentum=momentum, nesterov=nesterov, mode="reference", dtype=torch.float64, seed=fresh_seed
    )
    assert error(got[0], want[0]) < 5e-7
    assert not momentum or error(got[1], want[1]) < 5e-7
    if formats[1] is not None:
        assert all(torch.equal(c, p.to(formats[1])) for c, p in zip(got[2], got[0]))


def test_adamw_is_torch_adamw(fresh_seed):
    """The float64 reference has the formula of torch.optim.AdamW."""
    got = adam_run([300], F32, None, mode="reference", dtype=torch.float64, scale=1.0, seed=fresh_seed)
    generator = torch.Generator().manual_seed(fresh_seed)
    weight = torch.nn.Parameter(torch.randn(300, generator=generator).double())
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    for _ in range(3):
        weight.grad = torch.randn(300, generator=generator).double()
        optimizer.step()
    torch.testing.assert_close(got[0][0], weight.detach(), rtol=1e-12, atol=0)


def test_low_precision_results_do_not_depend_on_cuts():
    """A shard boundary must not change a bit, so that layouts agree."""
    whole, cut = (adam_run([10_007], BF16, BF16, cut=c) for c in (None, 333))
    for a, b in zip(whole, cut):
        assert torch.equal(a[0], b[0])


def test_results_do_not_depend_on_threads():
    before = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2):
            torch.set_num_threads(count)
            runs.append(adam_run([100_003, 17], BF16, F16))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*runs):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("formats", [(F32, None), (BF16, BF16)])
def test_skip_changes_nothing(formats):
    start = adam_run([100], *formats, steps=0)
    held = adam_run([100], *formats, skip=torch.tensor(1.0))
    moved = adam_run([100], *formats, skip=torch.tensor(0.0))
    assert torch.equal(start[0][0], held[0][0])
    assert torch.equal(start[1][0], held[1][0])
    assert not torch.equal(start[0][0], moved[0][0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_gradients_reach_the_weights_and_copies(bad):
    p, m, v, c = torch.ones(40), torch.zeros(40), torch.zeros(40), torch.zeros(40, dtype=BF16)
    g = torch.ones(40, dtype=BF16)
    g[[3, 37]] = bad
    kernels.adamw_(
        [p], [g], [m], [v], copies=[c], step=1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, scale=torch.tensor(1.0)
    )
    assert p.isnan().nonzero().flatten().tolist() == [3, 37]
    assert c.isnan().nonzero().flatten().tolist() == [3, 37]


def test_lengths_that_differ_are_refused():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match="range 0"):
        kernels.sgd_(
            [two], [one], None, copies=[None], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, scale=torch.tensor(1.0)
        )


@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64])
def test_squared_norm(dtype, fresh_seed):
    torch.manual_seed(fresh_seed)
    tensors = [(torch.randn(n) * 3).to(dtype) for n in (0, 1, 1_000_003, 4097)]
    want = sum(t.double().square().sum() for t in tensors)
    assert abs(kernels.squared_norm(tensors).item() / want.item() - 1) < 1e-6


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_squared_norm_of_equal_elements(mode, dtype):
    """Rounding errors of a plain running sum would all point one way."""
    x = torch.full((1 << 19,), 0.1).to(dtype)
    with kernels.using(mode):
        assert abs(kernels.squared_norm([x, x, x]).item() / (3 * x.double().square().sum().item()) - 1) < 1e-6


def test_float16_conversions_of_the_native_code():
    """Every float16 through a step that doesn't change it: read exactly, written exactly."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    g, copy = bits.view(F16), torch.zeros(1 << 16, dtype=F16)
    p = torch.zeros(1 << 16)
    kernels.sgd_([p], [g], None, copies=[copy], lr=-1.0, momentum=0.0, nesterov=False, weight_decay=0.0, scale=torch.tensor(1.0))
    assert torch.equal(p[~g.isnan()], g.float()[~g.isnan()])
    assert torch.equal(copy[~g.isnan()], g[~g.isnan()])
    assert copy[g.isnan()].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounding_of_the_native_code(dtype, fresh_seed):
    """Copies are rounded as torch rounds: nearest, ties to even, overflow to Inf, denormals."""
    generator = torch.Generator().manual_seed(fresh_seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32)
    ties = torch.arange(0, 1 << 16, dtype=torch.int64).mul(1 << 12).to(torch.int32) + 0x38000000 - (1 << 24)
    p = torch.cat([bits, ties]).view(F32)
    copy = torch.zeros(p.numel(), dtype=dtype)
    kernels.sgd_(
        [p], [torch.zeros(p.numel(), dtype=BF16)], None, copies=[copy], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0,
        scale=torch.tensor(1.0),
    )  # fmt: skip
    want = p.to(dtype)
    assert torch.equal(copy.isnan(), want.isnan())
    assert torch.equal(copy[~want.isnan()], want[~want.isnan()])


def test_squared_norm_of_nothing_and_of_bad_numbers():
    assert kernels.squared_norm([]).item() == 0
    assert kernels.squared_norm([torch.zeros(0)]).item() == 0
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.ones(200_000, dtype=BF16)
        x[150_000] = bad
        assert not kernels.squared_norm([torch.ones(5, dtype=BF16), x]).isfinite()


def test_a_replacement_takes_the_place_of_an_operation():
    calls = []
    kernels.replace("squared_norm", lambda tensors: calls.append(len(tensors)) or torch.tensor(7.0))
    try:
        assert kernels.squared_norm([torch.ones(3)]).item() == 7.0
    finally:
        kernels.replace("squared_norm", None)
    assert calls == [1]
    assert kernels.squared_norm([torch.ones(3)]).item() == 3.0
    with pytest.raises(KeyError, match="squared_norm"):
        kernels.replace("no_such", None)


CHILD = """
import logging, sys, torch, partita_kernels as k
assert 'triton' not in sys.modules
logging.basicConfig(level=logging.WARNING)
p, c = torch.ones(5), torch.zeros(5, dtype=torch.bfloat16)
for _ in range(2):
    k.sgd_([p], [torch.ones(5, dtype=torch.bfloat16)], None, copies=[c], lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0,
           scale=torch.tensor(1.0))
assert p.tolist() == c.tolist() == [0.0] * 5
"""


def child(cache: Path, **environment: str) -> subprocess.Popen:
    env = {**os.environ, "PARTITA_NATIVE_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.Popen([sys.executable, "-c", CHILD], env=env, stderr=subprocess.PIPE, text=True)


def test_without_a_compiler_torch_operations_do_it_and_the_log_says_so_once(tmp_path):
    process = child(tmp_path, CXX="no-such-compiler")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert errors.count("no native kernels for optimizer") == 1
    assert "no-such-compiler" in errors


@pytest.mark.skipif(native.shutil.which("g++") is None, reason="no C++ compiler here")
def test_processes_share_one_compilation(tmp_path):
    processes = [child(tmp_path) for _ in range(3)]
    for process in processes:
        errors = process.communicate(timeout=90)[1]
        assert process.returncode == 0, errors
        assert "no native kernels" not in errors
    assert len(list(tmp_path.glob("*.so"))) == 1
