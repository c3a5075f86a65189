"""Layers' operations against float64: norms, gated units, rotary positions, cross entropy; forward, gradients, odd shapes, bad numbers.

Run on whatever conftest.py sets up: CPU paths and plain torch, Triton's interpreter, or an accelerator.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from numbers64 import BF16, BOUNDS, F16, F32, compare, error, fresh, gradients, mixed, side_by_side

from partita_kernels import (
    add_layer_norm,
    add_rms_norm,
    cross_entropy,
    geglu,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    rope_angles,
    swiglu,
    swiglu_halves,
    vocab_parallel_cross_entropy,
)

SETTING = os.environ.get("PARTITA_KERNEL_TESTS", "")
DTYPES = [F32, BF16, F16]
# Not fewer elements in a row: what is left of the gradient after projection would be rounding.
SHAPES = [(5, 7), (2, 3, 64), (4, 300), (1, 31), (0, 8)]


def norm64(x, weight, bias, eps, center):
    n = x - x.mean(-1, keepdim=True) if center else x
    y = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize(("shape", "dtype"), [*side_by_side(SHAPES, DTYPES), (SHAPES[0], BF16), (SHAPES[1], F32)])
def test_rms_norm(shape, dtype, device):
    x, w = fresh(shape, dtype, device), fresh(shape[-1:], F32, device)
    compare(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: norm64(x, w, None, 1e-5, False), [x, w], BOUNDS[dtype])


@pytest.mark.parametrize(("shape", "dtype"), side_by_side(SHAPES[1:4], DTYPES))
def test_add_rms_norm(shape, dtype, device):
    x, r, w = fresh(shape, dtype, device), fresh(shape, dtype, device), fresh(shape[-1:], dtype, device)
    compare(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5), lambda x, r, w: (norm64(x + r, w, None, 1e-5, False), x + r), [x, r, w],
        BOUNDS[dtype] * (1 if dtype == F32 else 1.5),  # the sum is rounded, too
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "with_bias", "dtype"), mixed([*SHAPES[:3], SHAPES[4]], [True, False], DTYPES))
def test_layer_norm(shape, dtype, with_bias, device):
    x, w, b = fresh(shape, dtype, device) + 3, fresh(shape[-1:], dtype, device), fresh(shape[-1:], dtype, device)
    if with_bias:
        compare(lambda x, w, b: layer_norm(x, w, b), lambda x, w, b: norm64(x, w, b, 1e-5, True), [x, w, b], BOUNDS[dtype])
    else:
        compare(lambda x, w: layer_norm(x, w, None), lambda x, w: norm64(x, w, None, 1e-5, True), [x, w], BOUNDS[dtype])


@pytest.mark.parametrize("shape", [(6, 33)])
def test_add_layer_norm(shape, device):
    x, r, w, b = (fresh(s, F32, device) for s in (shape, shape, shape[-1:], shape[-1:]))
    compare(
        lambda x, r, w, b: add_layer_norm(x, r, w, b),
        lambda x, r, w, b: (norm64(x + r, w, b, 1e-5, True), x + r),
        [x, r, w, b],
        BOUNDS[F32],
    )


def test_norms_take_slices_and_more_rows_than_programs(device, small_blocks):
    small_blocks("norm", 32, "programs")
    wide = fresh((70, 2, 20), F32, device)
    w = fresh((10,), F32, device)
    compare(
        lambda x, w: rms_norm(x[:, 1, 5:15], w), lambda x, w: norm64(x[:, 1, 5:15], w, None, 1e-6, False), [wide, w], BOUNDS[F32]
    )


ACTIVATIONS = {
    "silu": (swiglu, F.silu),
    "gelu_tanh": (geglu, lambda x: F.gelu(x, approximate="tanh")),
    "gelu": (lambda g, u: geglu(g, u, "none"), F.gelu),
}


@pytest.mark.parametrize(("kind", "dtype", "shape"), mixed(list(ACTIVATIONS), DTYPES, [(3, 5), (2, 3, 130), (0, 4)]))
def test_gated_units(kind, shape, dtype, device):
    ours, act = ACTIVATIONS[kind]
    g, u = fresh(shape, dtype, device) * 3, fresh(shape, dtype, device)
    compare(ours, lambda g, u: act(g) * u, [g, u], BOUNDS[dtype])


def test_gated_units_take_halves_of_one_tensor_and_extreme_gates(device):
    both = fresh((4, 3, 34), F32, device)
    both[0, 0, :6] = torch.tensor([-1e30, -200.0, -90.0, 90.0, 200.0, 1e15])
    for ours in (lambda b: swiglu(*b.chunk(2, -1)), swiglu_halves):
        compare(ours, lambda b: F.silu(b[..., :17]) * b[..., 17:], [both], BOUNDS[F32])
    many = fresh((3, 2, 8), BF16, device)
    torch.testing.assert_close(swiglu_halves(many), swiglu(*many.chunk(2, -1)))
    nothing = many[:0].requires_grad_()
    swiglu_halves(nothing).sum().backward()
    assert nothing.grad.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("shape", "per_batch", "dtype"), mixed([(2, 3, 5, 8), (1, 2, 4, 6), (2, 1, 3, 2), (0, 1, 2, 4)], [False, True], DTYPES)
)
def test_rope(shape, per_batch, dtype, device):
    b, h, t, d = shape
    positions = torch.randint(0, 50, (b, t) if per_batch else (t,), device=device)
    cos, sin = rope_angles(positions, d)
    x = fresh((b, t, h, d), dtype, device)

    def exact(x):
        pairs = torch.complex(*x.transpose(1, 2).chunk(2, -1))
        turn = torch.complex(cos.double(), sin.double())
        turned = pairs * (turn[:, None] if per_batch else turn)
        return torch.cat([turned.real, turned.imag], -1)

    compare(lambda x: rope(x.transpose(1, 2), cos, sin), exact, [x], BOUNDS[dtype])


def test_rope_refuses_shapes_that_do_not_fit(device):
    cos, sin = rope_angles(torch.arange(4, device=device), 8)
    with pytest.raises(ValueError, match="rope"):
        rope(fresh((1, 2, 5, 8), F32, device), cos, sin)


def loss64(x, y, smoothing, z_loss, ignore=-100):
    keep = y != ignore
    lse = x.logsumexp(-1)
    each = F.cross_entropy(x, y, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    return (each + z_loss * lse.square())[keep].sum()


def some_labels(rows, classes, device, ignore=-100):
    y = torch.randint(0, classes, (rows,), device=device)
    y[::3] = ignore
    return y


def loss_terms(x, y, ignore=-100):
    """Sizes of what the loss (lse - x_y) and its gradient (softmax - one) are differences of: with few classes, sure rows leave next to nothing."""
    kept = x.double()[y != ignore]
    chosen = kept.gather(1, y[y != ignore][:, None])
    return (kept.logsumexp(1).abs().sum() + chosen.abs().sum()).item(), len(kept) ** 0.5


@pytest.mark.parametrize(("classes", "weights", "dtype"), mixed([2, 77, 1030], [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)], DTYPES))
def test_cross_entropy(classes, weights, dtype, device):
    x, y = fresh((7, classes), dtype, device) * 4, some_labels(7, classes, device)
    smoothing, z_loss = weights
    compare(
        lambda x: cross_entropy(x, y, label_smoothing=smoothing, z_loss=z_loss)[0],
        lambda x: loss64(x, y, smoothing, z_loss),
        [x],
        BOUNDS[dtype],
        loss_terms(x, y),
    )
    assert cross_entropy(x, y)[1].item() == (y != -100).sum().item()


def test_cross_entropy_over_several_blocks_of_classes(device, small_blocks):
    small_blocks("loss", 128)
    x, y = fresh((3, 1000), F32, device) * 4, some_labels(3, 1000, device)
    x[1, 200:300] = -torch.inf
    compare(lambda x: cross_entropy(x, y)[0], lambda x: loss64(x, y, 0.0, 0.0), [x], BOUNDS[F32])


def test_cross_entropy_without_counted_labels(device):
    for rows in (0, 3):
        x = fresh((rows, 5), F32, device).requires_grad_()
        total, count = cross_entropy(x, torch.full((rows,), -100, device=device))
        total.backward()
        assert total.item() == count.item() == x.grad.abs().sum().item() == 0


def test_cross_entropy_with_other_ignored_label_and_labels_outside(device):
    x = fresh((3, 5), F32, device)
    assert cross_entropy(x, torch.tensor([0, 0, 1], device=device), ignore_index=0)[1].item() == 1
    for label in (5, -1, 1 << 40):
        assert cross_entropy(x, torch.tensor([0, label, 1], device=device))[0].isnan()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_pass_through(bad, device):
    x, w = fresh((4, 40), F32, device), fresh((40,), F32, device)
    x[2, 33] = bad
    rows = torch.tensor([False, False, True, False], device=device)
    for y in (rms_norm(x, w), layer_norm(x, w, None)):
        assert torch.equal(~y.isfinite().all(1), rows)
    assert torch.equal(~swiglu(x, x).isfinite().all(1), rows)
    assert not cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=device))[0].isfinite()
    x[2, 33] = 1.0
    x.requires_grad_()
    rms_norm(x, w).sum().mul(bad).backward()
    assert not x.grad.isfinite().any()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [4, 1000])
def test_linear_cross_entropy(chunk, dtype, device, monkeypatch):
    monkeypatch.setattr("partita_kernels.linear_loss.LEAST_ROWS", chunk)
    monkeypatch.setattr("partita_kernels.linear_loss.CHUNK_BYTES", {"cpu": 0, "accelerator": 0})
    x, w, y = fresh((2, 5, 12), dtype, device), fresh((33, 12), dtype, device), some_labels(10, 33, device).view(2, 5)
    compare(
        lambda x, w: linear_cross_entropy(x, w, y, label_smoothing=0.1, z_loss=1e-3)[0] * 0.5,
        lambda x, w: loss64((x @ w.t()).view(10, 33), y.view(-1), 0.1, 1e-3) * 0.5,
        [x, w],
        BOUNDS[dtype] * (2 if dtype == F32 else 4),
    )


def test_linear_cross_entropy_of_no_rows_and_without_gradients(device):
    x, w = fresh((0, 4), F32, device).requires_grad_(), fresh((9, 4), F32, device).requires_grad_()
    total, count = linear_cross_entropy(x, w, torch.zeros(0, dtype=torch.int64, device=device))
    assert total.item() == count.item() == 0
    assert gradients(total, [w])[0].abs().sum() == 0
    with torch.no_grad():
        total, _ = linear_cross_entropy(fresh((3, 4), F32, device), w, torch.zeros(3, dtype=torch.int64, device=device))
    assert not total.requires_grad


class Shards:
    """Ranks in threads of one process: what each gives is joined when all have given."""

    def __init__(self, ranks):
        self.gate, self.given, self.ranks = threading.Barrier(ranks, timeout=60), {}, ranks

    def reduce(self, rank, join):
        def run(t):
            self.given[rank] = t.clone()
            self.gate.wait()
            joined = join(torch.stack([self.given[r] for r in range(self.ranks)]))
            self.gate.wait()
            return joined

        return run


@pytest.mark.parametrize(
    ("widths", "weights", "dtype"), mixed([(30, 47), (77,), (50, 0, 27)], [(0.0, 0.0), (0.1, 0.01)], [F32, BF16])
)
def test_vocab_parallel_cross_entropy(widths, weights, dtype, device):
    """Each shard's gradient is its part of the gradient of the whole; labels next to and far from each cut."""
    smoothing, z_loss = weights
    whole = fresh((3, 4, 77), dtype, device) * 4
    y = some_labels(12, 77, device).view(3, 4)
    y[0, 1], y[1, 2], y[2, 2] = 29, 30, 49
    shards = Shards(len(widths))

    def run(rank):
        part = whole.split(widths, -1)[rank].clone().requires_grad_()
        total, count = vocab_parallel_cross_entropy(
            part, y, offset=sum(widths[:rank]), classes=77, label_smoothing=smoothing, z_loss=z_loss,
            reduce_max=shards.reduce(rank, lambda t: t.amax(0)), reduce_sum=shards.reduce(rank, lambda t: t.sum(0)),
        )  # fmt: skip
        return total, count, gradients(total, [part])[0]

    if len(widths) > 1 and SETTING == "interpreter":
        pytest.skip("the interpreter has one state for all threads")
    with ThreadPoolExecutor(len(widths)) as pool:
        results = list(pool.map(run, range(len(widths))))
    exact = whole.double().requires_grad_()
    want = loss64(exact.view(12, 77), y.view(-1), smoothing, z_loss)
    for total, count, _ in results:
        assert abs(total.item() / want.item() - 1) < 2e-6
        assert count.item() == (y != -100).sum().item()
    got = torch.cat([g for *_, g in results], -1)
    assert error(got, gradients(want, [exact])[0]) < BOUNDS[dtype] * 1.5


def test_vocab_parallel_labels_outside_spoil_the_loss(device):
    def same(t):
        return t

    x = fresh((3, 5), F32, device)
    for label in (5, -1):
        y = torch.tensor([0, label, 1], device=device)
        total, _ = vocab_parallel_cross_entropy(x, y, offset=0, classes=5, reduce_max=same, reduce_sum=same)
        assert total.isnan()
