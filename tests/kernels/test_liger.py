"""liger-kernel's kernels behind our operations (`kernels.replace`), against float64: under Triton's interpreter, or on an accelerator."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from numbers64 import BF16, BOUNDS, F16, F32, compare, error, fresh, gradients, mixed

import partita_kernels as kernels
from partita.errors import ConfigError
from partita.train.liger import OPERATIONS, make_liger

INTERPRETED = os.environ.get("PARTITA_KERNEL_TESTS") == "interpreter"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel isn't installed")
LOW = F16 if INTERPRETED else BF16  # the interpreter multiplies the bits of bfloat16
MIXED = mixed([(5, 7), (2, 3, 64), (4, 300), (0, 8)], [True, False], [F32, LOW, F16])


@pytest.fixture(autouse=True)
def liger(monkeypatch):
    """In the place of ours."""
    calls: dict[str, int] = {}

    def counted(name):
        implementation = make_liger(name)

        def run(*args):
            calls[name] = calls.get(name, 0) + 1
            return implementation(*args)

        return run

    if INTERPRETED:
        mend_interpreter(monkeypatch)
    for name in OPERATIONS:
        kernels.replace(name, counted(name))
    yield calls
    for name in OPERATIONS:
        kernels.replace(name, None)


def mend_interpreter(monkeypatch):
    """It leaves floats Python's, where liger's kernels want a scalar, and has none of the device's functions."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def scalars(arg):
        if isinstance(arg, float):
            return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        return convert(arg)

    monkeypatch.setattr(interpreter, "_implicit_cvt", scalars)
    for name in ("geglu", "rms_norm", "layer_norm", "fused_add_rms_norm"):
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        monkeypatch.setattr(module, "rsqrt", lambda x: tl.rsqrt(x), raising=False)
        monkeypatch.setattr(module, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1, raising=False)


def bound(dtype):
    """Its kernels multiply some factors in the dtype of the inputs."""
    return BOUNDS[dtype] * (1.5 if dtype == F32 else 3)


def norm64(x, weight, bias, center):
    n = x - x.mean(-1, keepdim=True) if center else x
    y = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + 1e-5) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize(("shape", "center", "dtype"), MIXED)
def test_norms(shape, center, dtype, device, liger):
    x, r, w, b = (fresh(s, dtype, device) for s in (shape, shape, shape[-1:], shape[-1:]))
    if center:
        compare(lambda x, w, b: kernels.layer_norm(x, w, b), lambda x, w, b: norm64(x, w, b, True), [x, w, b], bound(dtype))
        compare(
            lambda x, r, w: kernels.add_layer_norm(x, r, w, None), lambda x, r, w: (norm64(x + r, w, None, True), x + r),
            [x, r, w], bound(dtype) * 1.5,
        )  # fmt: skip
    else:
        compare(lambda x, w: kernels.rms_norm(x, w, 1e-5), lambda x, w: norm64(x, w, None, False), [x, w], bound(dtype))
        compare(
            lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-5), lambda x, r, w: (norm64(x + r, w, None, False), x + r),
            [x, r, w], bound(dtype) * 1.5,
        )  # fmt: skip
    assert set(liger) == {"norm", "norm_backward"}


@pytest.mark.parametrize(("shape", "silu", "dtype"), MIXED)
def test_gated_units(shape, silu, dtype, device, liger):
    g, u = fresh(shape, dtype, device), fresh(shape, dtype, device)
    ours = kernels.swiglu if silu else kernels.geglu
    compare(ours, lambda g, u: (F.silu(g) if silu else F.gelu(g, approximate="tanh")) * u, [g, u], bound(dtype))
    x = fresh((*shape[:-1], 2 * shape[-1]), dtype, device)
    if silu:
        compare(kernels.swiglu_halves, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [x], bound(dtype))
    assert set(liger) == {"glu", "glu_backward"}


@pytest.mark.parametrize(("each", "dtype"), [(False, F32), (True, LOW), (True, F32)])
def test_rope(each, dtype, device, liger):
    x = fresh((2, 5, 3, 12), dtype, device).transpose(1, 2)
    positions = torch.arange(5, device=device) if not each else torch.randint(100, (2, 5), device=device)
    cos, sin = kernels.rope_angles(positions, 12)

    def exact(x):
        a, z = x.chunk(2, -1)
        c, s = (t.double() if t.dim() == 2 else t.double()[:, None] for t in (cos, sin))
        return torch.cat([a * c - z * s, z * c + a * s], -1)

    before = x.clone()
    compare(lambda x: kernels.rope(x, cos, sin), exact, [x], bound(dtype))
    assert torch.equal(x, before)
    assert set(liger) == {"rope"}


def loss64(x, y, smoothing, z_loss):
    lse = x.logsumexp(-1)
    loss = F.cross_entropy(x, y, reduction="none", label_smoothing=smoothing, ignore_index=-100)
    return (loss + z_loss * lse.square().masked_fill(y == -100, 0.0)).sum()


@pytest.mark.parametrize(("fused", "weights", "dtype"), mixed([False, True], [(0.0, 0.0), (0.1, 0.01)], [F32, LOW]))
def test_cross_entropy(fused, weights, dtype, device, liger):
    y = torch.randint(77, (12,), device=device)
    y[3] = -100
    more = {"label_smoothing": weights[0], "z_loss": weights[1]}
    x, w = fresh((12, 16 if fused else 77), dtype, device), fresh((77, 16), dtype, device)
    limit = bound(dtype) * (3 if fused else 1)  # logits are rounded between the product and the loss
    if fused:
        compare(
            lambda x, w: kernels.linear_cross_entropy(x, w, y, **more)[0],
            lambda x, w: loss64(x @ w.t(), y, *weights), [x, w], limit,
        )  # fmt: skip
        assert set(liger) == {"linear_cross_entropy"}
        return
    before = x.clone()
    compare(lambda x: kernels.cross_entropy(x, y, **more)[0], lambda x: loss64(x, y, *weights), [x], limit)
    assert torch.equal(x, before)
    assert set(liger) == {"cross_entropy", "cross_entropy_backward"}


@pytest.mark.parametrize("fused", [False, True])
def test_labels_outside_make_the_loss_nan(fused, device):
    x, w = fresh((3, 8), F32, device), fresh((5, 8), F32, device)
    for label in (5, -1):
        y = torch.tensor([0, label, 1], device=device)
        assert (kernels.linear_cross_entropy(x, w, y) if fused else kernels.cross_entropy(x[:, :5], y))[0].isnan()
    y = torch.full((3,), -100, device=device)
    leaf = x.clone().requires_grad_()
    total, count = kernels.linear_cross_entropy(leaf, w, y) if fused else kernels.cross_entropy(leaf, y)
    assert total.item() == count.item() == 0
    assert error(gradients(total, [leaf])[0], torch.zeros_like(x)) == 0


def test_what_it_does_not_do_is_refused(device):
    x = fresh((2, 8), F32, device)
    with pytest.raises(ConfigError, match=r"(?s)kernels\.replace\.glu=liger: it has GELU by tanh.*Leave the entry out"):
        kernels.geglu(x, x, "none")
    with pytest.raises(ConfigError, match=r"don't compute in torch\.float64"):
        kernels.rms_norm(x.double(), x[0].double())
