"""CPU paths: conversions of the C++ code, independence of cuts and threads, one compilation for all, life without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numbers64 import BF16, F16, F32
from updates import adam_run, sgd_once

import partita_kernels as kernels
from partita_kernels import native


def same_bits(a, b) -> bool:
    """Are the parameters, states and copies of two runs the same?"""
    lists = zip([a.params, *a.states, a.copies], [b.params, *b.states, b.copies], strict=True)
    return all(torch.equal(x, y) for one, other in lists for x, y in zip(one, other))


@pytest.mark.parametrize("decoupled", [True, False])
def test_low_precision_results_do_not_depend_on_cuts(decoupled):
    """A shard boundary must not change a bit, so that layouts agree."""
    runs = [adam_run([40_007], BF16, BF16, cut=c, decoupled=decoupled) for c in (None, 333)]
    assert same_bits(*runs)


def test_results_do_not_depend_on_threads():
    before, runs = torch.get_num_threads(), []
    x, w = torch.randn(100, 50), torch.randn(50)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            leaf = w.clone().requires_grad_()
            kernels.rms_norm(x, leaf).square().sum().backward()
            runs.append((adam_run([100_003, 17], BF16, F16), kernels.squared_norm([x.bfloat16()]), leaf.grad))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert same_bits(run[0], runs[0][0])
        assert torch.equal(run[1], runs[0][1])
        assert torch.equal(run[2], runs[0][2])


def test_adamw_is_torch_adamw(fresh_seed):
    """The float64 reference has the formula of torch.optim.AdamW."""
    with kernels.using("reference"):
        got = adam_run([300], F32, None, dtype=torch.float64, scale=1.0, seed=fresh_seed)
    generator = torch.Generator().manual_seed(fresh_seed)
    weight = torch.nn.Parameter(torch.randn(300, generator=generator).double())
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    for _ in range(3):
        weight.grad = torch.randn(300, generator=generator).double()
        optimizer.step()
    torch.testing.assert_close(got.params[0], weight.detach(), rtol=1e-12, atol=0)


def test_float16_is_read_and_written_exactly():
    """Every float16, through a step that copies the gradient to the weight."""
    g = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(F16)
    p, copy = torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=F16)
    sgd_once(p, g, copy, lr=-1.0)
    assert torch.equal(p[~g.isnan()], g.float()[~g.isnan()])
    assert torch.equal(copy[~g.isnan()], g[~g.isnan()])
    assert copy[g.isnan()].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_copies_are_rounded_as_torch_rounds(dtype, fresh_seed):
    """Nearest, ties to even, overflow to Inf, denormals."""
    generator = torch.Generator().manual_seed(fresh_seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32)
    ties = torch.arange(0, 1 << 16, dtype=torch.int64).mul(1 << 12).to(torch.int32) + 0x38000000 - (1 << 24)
    p = torch.cat([bits, ties]).view(F32)
    copy = torch.zeros(p.numel(), dtype=dtype)
    sgd_once(p, torch.zeros(p.numel(), dtype=BF16), copy)
    want = p.to(dtype)
    assert torch.equal(copy.isnan(), want.isnan())
    assert torch.equal(copy[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_squared_norm_of_equal_elements(mode, dtype):
    """Rounding errors of a plain running sum would all point one way."""
    x = torch.full((1 << 19,), 0.1).to(dtype)
    with kernels.using(mode):
        assert abs(kernels.squared_norm([x, x, x]).item() / (3 * x.double().square().sum().item()) - 1) < 1e-6


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


def test_without_a_compiler_torch_does_it_and_the_log_says_so_once(tmp_path):
    process = child(tmp_path, CXX="no-such-compiler")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert errors.count("no native kernels for optimizer") == 1
    assert "no-such-compiler" in errors


@pytest.mark.skipif(native.shutil.which("g++") is None, reason="no C++ compiler here")
def test_processes_share_one_compilation(tmp_path):
    processes = [child(tmp_path) for _ in range(3)]
    for process in processes:
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == 0, errors
        assert "no native kernels" not in errors
    assert len(list(tmp_path.glob("*.so"))) == 1


@pytest.mark.parametrize("n", [0, 1, 31, 64, 1000, 100_003])
@pytest.mark.parametrize("shift", [0, 3])
def test_put_squared(n, shift):
    into, first, second = torch.randn(n + 8)[shift : shift + n], torch.randn(n), torch.randn(n)
    square = kernels.put_squared(into, first, add=False)
    assert torch.equal(into, first) and square == pytest.approx(first.double().square().sum().item(), rel=1e-12)
    square = kernels.put_squared(into, second, add=True)
    assert torch.equal(into, first + second)
    assert square == pytest.approx((first + second).double().square().sum().item(), rel=1e-12)
    if n > 5:
        second[5] = float("inf")
        assert kernels.put_squared(into, second, add=True) == float("inf")
        second[7] = float("nan")
        assert kernels.put_squared(into, second, add=False) != kernels.put_squared(into, first, add=True)


def test_put_squared_leaves_other_formats_and_replaced_norms_to_torch():
    into, value = torch.zeros(5), torch.arange(5.0)
    assert kernels.put_squared(into, value.bfloat16(), add=False) is None and torch.equal(into, value)
    assert kernels.put_squared(into, torch.stack((value, value), 1)[:, 0], add=True) is None and torch.equal(into, 2 * value)
    kernels.replace("squared_norm", lambda tensors: torch.tensor(7.0))
    try:
        assert kernels.put_squared(into, value, add=True) is None and torch.equal(into, 3 * value)
    finally:
        kernels.replace("squared_norm", None)
