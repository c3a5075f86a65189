"""Optimizer updates and the squared norm against float64 and torch.optim: formats, empty ranges, skipping, bad numbers.

Run on whatever conftest.py sets up: CPU paths and plain torch, Triton's interpreter, or an accelerator.
"""

from __future__ import annotations

import pytest
import torch
from numbers64 import BF16, F16, F32, error, mixed
from updates import Narrow, adam_run, lion_run, sgd_once, sgd_run

import partita_kernels as kernels
from partita_kernels import rounding

SIZES = [0, 1, 15, 5000]


def close(got, want, bound=5e-7):
    """Weights and states of a run, over all ranges."""
    for mine, exact in zip([got.params, *got.states], [want.params, *want.states], strict=True):
        assert error(torch.cat(mine).cpu(), torch.cat(exact)) < bound


def copies_are_rounded_weights(run):
    assert all(c is None or torch.equal(c, p.to(c.dtype)) for c, p in zip(run.copies, run.params))


@pytest.mark.parametrize(("grad_dtype", "copy_dtype", "decoupled"), mixed([F32, BF16, F16], [None, BF16, F16], [True, False]))
def test_adamw_against_float64(grad_dtype, copy_dtype, decoupled, device, fresh_seed):
    got = adam_run(SIZES, grad_dtype, copy_dtype, decoupled=decoupled, seed=fresh_seed, device=device)
    copies_are_rounded_weights(got)
    with kernels.using("reference"):
        close(got, adam_run(SIZES, grad_dtype, None, decoupled=decoupled, dtype=torch.float64, seed=fresh_seed))


@pytest.mark.parametrize("rule", [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("formats", [(F32, F16), (BF16, BF16), (F16, None)])
def test_sgd_against_float64(formats, rule, device, fresh_seed):
    momentum, nesterov = rule
    got = sgd_run(SIZES, *formats, momentum=momentum, nesterov=nesterov, seed=fresh_seed, device=device)
    copies_are_rounded_weights(got)
    with kernels.using("reference"):
        close(got, sgd_run(SIZES, formats[0], None, momentum=momentum, nesterov=nesterov, dtype=torch.float64, seed=fresh_seed))


@pytest.mark.parametrize("formats", [(F32, None), (BF16, BF16), (F16, None)])
def test_lion_against_float64(formats, device, fresh_seed):
    got = lion_run(SIZES, *formats, seed=fresh_seed, device=device)
    copies_are_rounded_weights(got)
    with kernels.using("reference"):
        close(got, lion_run(SIZES, formats[0], None, dtype=torch.float64, seed=fresh_seed), bound=2e-6)


@pytest.mark.parametrize("copy_dtype", [None, BF16])
@pytest.mark.parametrize(("seen", "frozen"), [(2, False), (2, True), (5, True)])
def test_second_moments_that_do_not_follow_every_step(seen, frozen, copy_dtype, device, fresh_seed):
    """Against the formula in float64; frozen ones stay to the bit."""
    torch.manual_seed(fresh_seed)
    p, g, m = (torch.randn(700) for _ in range(3))
    v, lr, beta1, beta2, eps, decay = torch.rand(700), 0.1, 0.9, 0.95, 1e-8, 0.1
    second = v.double() if frozen else beta2 * v.double() + (1 - beta2) * g.double() ** 2
    first = beta1 * m.double() + (1 - beta1) * g.double()
    root = (second / (1 - beta2**seen)).sqrt() + eps
    want = p.double() * (1 - lr * decay) - lr * first / (1 - beta1**5) / root
    got = [t.to(device) for t in (p, g, m, v)]
    copy = None if copy_dtype is None else torch.zeros(700, dtype=copy_dtype, device=device)
    kernels.adamw_(
        *([t] for t in got), copies=[copy], step=5, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay,
        scale=torch.ones((), device=device), seen=seen, frozen=frozen,
    )  # fmt: skip
    assert error(got[0].cpu(), want) < 5e-7 and error(got[2].cpu(), first) < 5e-7
    assert torch.equal(got[3].cpu(), v) if frozen else error(got[3].cpu(), second) < 5e-7
    assert copy is None or torch.equal(copy, got[0].to(copy_dtype))


@pytest.mark.parametrize("grad_dtype", [F32, BF16])
def test_ranges_with_numbers_of_their_own(grad_dtype, device, fresh_seed):
    """One call with a list is the same as a call for each range."""

    def run(together):
        torch.manual_seed(fresh_seed)
        p, g = ([torch.randn(n).to(d).to(device) for n in (700, 1, 40)] for d in (F32, grad_dtype))
        m, v = ([torch.zeros_like(t) for t in p] for _ in range(2))
        lrs, decays = [0.1, 0.2, 0.0], [0.0, 0.3, 0.1]
        for at in [slice(0, 3)] if together else [slice(i, i + 1) for i in range(3)]:
            lr, decay = (lrs[at], decays[at]) if together else (lrs[at][0], decays[at][0])
            kernels.adamw_(
                p[at], g[at], m[at], v[at], copies=[None] * len(p[at]), step=2, lr=lr, beta1=0.9, beta2=0.99, eps=1e-8,
                weight_decay=decay, scale=torch.ones((), device=device),
            )  # fmt: skip
        return p

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False)))
    with pytest.raises(ValueError, match="lr: 2 numbers for 1 ranges"):
        sgd_once(torch.zeros(3, device=device), torch.zeros(3, device=device), lr=[1.0, 2.0])


NARROW = [(F32, torch.uint8), (BF16, BF16), (BF16, F32), (BF16, torch.uint8), (F32, BF16)]


@pytest.mark.parametrize(("param", "state", "random"), [*[(*f, True) for f in NARROW], *[(*f, False) for f in NARROW[:2]]])
def test_narrow_formats_are_those_of_the_reference(param, state, random, device, fresh_seed):
    """Same random bits, so the same codes; a sum may differ in its last bit, which a rounding can make a whole step of the format."""
    ours, plain = (Narrow([0, 700, 256, 5], param, state, device, fresh_seed) for _ in range(2))
    for k in (1, 2, 3):
        ours.step(k, random=random)
    with kernels.using("reference"):
        for k in (1, 2, 3):
            plain.step(k, random=random)
    for a, b in zip(ours.tensors(), plain.tensors()):
        different = (a.double() != b.double()).sum().item()
        assert different <= max(2, 0.01 * a.numel()) if a.dtype != F32 else error(a, b) < 2e-3


@pytest.mark.parametrize("state", [torch.uint8, BF16])
def test_stochastic_rounding_does_not_depend_on_cuts(state, device):
    runs = [Narrow([2000], BF16, state, device) for _ in range(2)]
    for run, cut in zip(runs, (None, 512)):
        for k in (1, 2):
            run.step(k, cut=cut)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].tensors(), runs[1].tensors()))


def test_stochastic_rounding_keeps_small_updates(device):
    """Weights of 1 and steps of 1e-3, where a step of bfloat16 is 4e-3: on average they move as they should."""
    moved = {}
    for random in (True, False):
        run = Narrow([2048], BF16, F32, device)
        run.params[0].fill_(1.0)
        ones = torch.ones(2048, device=device)
        for k in (1, 2, 3):
            run.step(k, [ones], random, lr=1e-3)
        moved[random] = (1 - run.params[0].double().mean()).item()
    assert moved[False] == 0
    assert abs(moved[True] / 3.3e-3 - 1) < 0.1  # three steps of lr, and of lr x decay of 0.1 x 1


def test_random_bits_are_even_and_differ(device):
    at = rounding.random_bits((1 << 32) - 5000, 10_000, rounding.Rounding(3, 7, []).keys(), 1, device)
    assert ((at >= 0) & (at < 1 << 32)).all()
    assert at.unique().numel() > 9_990
    for bit in range(32):
        assert abs(((at >> bit) & 1).double().mean().item() - 0.5) < 0.03
    other = rounding.random_bits((1 << 32) - 5000, 10_000, rounding.Rounding(3, 8, []).keys(), 1, device)
    assert (at == other).sum() < 3


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_states_keep_three_bits(signed, device):
    x = torch.randn(1000, device=device) * 10.0 ** torch.randint(-3, 4, (1000,), device=device)
    x = x if signed else x.abs()
    codes, scales = torch.zeros(1000, dtype=torch.uint8, device=device), torch.zeros(4, device=device)
    rounding.encode8(x, codes, scales, signed, None)
    back = rounding.decode8(codes, scales, signed)
    peak = scales.repeat_interleave(256)[:1000]
    small = x.abs() < peak * 2.0**-15
    assert ((back - x).abs() <= x.abs() / 16 * 1.0001)[~small].all()
    assert (back[small].abs() <= peak[small] * 2.0**-15).all()
    if not signed:
        assert (back > 0).all()
    average = torch.zeros(1000, device=device)
    for step in range(200):
        bits = rounding.random_bits(0, 1000, rounding.Rounding(1, step, []).keys(), 1, device)
        rounding.encode8(x, codes, scales, signed, bits)
        average += rounding.decode8(codes, scales, signed) / 200
    # An average of 200 that are off by one step or the other, a step being at most x / 8: six standard deviations, for each of 1000.
    assert (((average - x) / x)[~small].abs() < 6 * 0.0625 / 200**0.5).all()


def test_bad_numbers_spoil_a_block_of_8_bit_states(device):
    run = Narrow([600], F32, torch.uint8, device)
    g = torch.ones(600, device=device)
    g[300] = float("nan")
    run.step(1, [g])
    assert run.params[0].isnan().nonzero().flatten().tolist() == [300]
    run.step(2, [torch.ones(600, device=device)])
    assert run.params[0].isnan().nonzero().flatten().tolist() == list(range(256, 512))


def test_8_bit_states_start_at_whole_blocks(device):
    run = Narrow([600], F32, torch.uint8, device)
    run.starts = [100]
    with pytest.raises(ValueError, match="multiple of 256"):
        run.step(1)


@pytest.mark.parametrize("formats", [(F32, None), (BF16, BF16)])
@pytest.mark.parametrize("run", [adam_run, sgd_run, lion_run])
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


def test_gradients_stay_as_they_are(device, fresh_seed):
    """Torch's fused updates leave the product with the scale in them; whoever reads gradients after a step means those of backward."""
    g, scale = torch.randn(1000).to(device), torch.tensor(0.3, device=device)
    left = g.clone()
    p, m, v = (torch.zeros(1000, device=device) for _ in range(3))
    kernels.adamw_(
        [p], [left], [m], [v], copies=[None], step=1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, scale=scale
    )
    kernels.sgd_([p], [left], None, copies=[None], lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0, scale=scale)
    torch.testing.assert_close(left, g, rtol=1e-6, atol=0.0)


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
