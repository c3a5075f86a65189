"""Mixture of experts against plain loops in float64: routing, sorting by expert, rows there and back, grouped products, and a layer of all of them."""

from __future__ import annotations

import pytest
import torch
from numbers64 import BF16, BOUNDS, F16, F32, compare, error, fresh, mixed

from partita_kernels import expert_order, grouped_matmul, permute, route, swiglu, unpermute

# ---- routing

# Experts, chosen, groups, groups kept.
CHOICES = [(8, 2, 1, 1), (7, 1, 1, 1), (5, 5, 1, 1), (24, 4, 6, 2), (9, 3, 3, 1)]


def route64(x, gate, bias, k, groups, kept, scale):
    """One token after the other."""
    gates, probabilities, chosen = [], [], []
    for row in x:
        s = row.sigmoid() if gate == "sigmoid" else row.softmax(0)
        probabilities.append(s / s.sum())
        wanted = (s + bias).tolist()
        size = len(wanted) // groups
        best = sorted(range(groups), key=lambda g: -sum(sorted(wanted[g * size : (g + 1) * size])[-2:]))[:kept]
        able = [e for g in best for e in range(g * size, (g + 1) * size)]
        chosen.append(sorted(able, key=lambda e: (-wanted[e], e))[:k])
        mine = s[chosen[-1]]
        gates.append(scale * (mine if gate == "softmax_all" else mine / mine.sum()))
    return torch.stack(gates), torch.stack(probabilities), torch.tensor(chosen)


@pytest.mark.parametrize(
    ("choice", "gate", "dtype"), mixed(CHOICES, ["softmax_all", "softmax_chosen", "sigmoid"], [F32, BF16, F16])
)
def test_route(choice, gate, dtype, device, small_blocks):
    small_blocks("routing", 256, "tile")
    experts, k, groups, kept = choice
    wide, bias = fresh((9, 2 * experts), dtype, device), fresh((experts,), F32, device) * 0.1
    got = route(wide[:, 1 : experts + 1], k, gate, bias=bias, groups=groups, kept_groups=kept, scale=2.5)[0]
    want = route64(wide[:, 1 : experts + 1].double(), gate, bias.double(), k, groups, kept, 2.5)[2]
    assert torch.equal(got.cpu(), want)
    compare(
        lambda x: route(x[:, 1 : experts + 1], k, gate, bias=bias, groups=groups, kept_groups=kept, scale=2.5)[1:],
        lambda x: route64(x[:, 1 : experts + 1], gate, bias.double(), k, groups, kept, 2.5)[:2],
        [wide],
        BOUNDS[dtype] * (2 if dtype == F32 else 1),  # gradients are differences of probabilities
    )


def test_equal_scores_choose_the_first_and_no_token_is_no_problem(device):
    experts, gates, _ = route(torch.zeros(2, 6, device=device), 3)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(gates, torch.full_like(gates, 1 / 3))
    assert [tuple(t.shape) for t in route(torch.zeros(0, 6, device=device), 3)] == [(0, 3), (0, 3), (0, 6)]


@pytest.mark.parametrize("gate", ["softmax_all", "sigmoid"])
def test_bad_scores_pass_through(gate, device):
    x = fresh((3, 6), F32, device)
    x[1, 4] = torch.nan
    x[2, 2] = torch.inf
    experts, gates, _ = route(x, 2, gate)
    assert ((experts >= 0) & (experts < 6)).all()
    assert gates[1].isnan().any()
    assert gates[0].isfinite().all()


def test_choices_that_do_not_fit_are_refused(device):
    x = torch.zeros(2, 6, device=device)
    for more in ({"k": 7}, {"k": 0}, {"k": 1, "groups": 4}, {"k": 4, "groups": 2}, {"k": 1, "gate": "hard"}):
        with pytest.raises(ValueError):
            route(x, **more)


# ---- order


def some_choices(tokens, k, experts, device):
    """Some have no expert, and some experts have none."""
    choices = torch.randint(-1, experts - 1, (tokens, k), device=device)
    return choices.masked_fill(choices == 1, 0)


@pytest.mark.parametrize(("tokens", "k", "experts"), [(0, 2, 3), (1, 1, 2), (37, 3, 5), (50, 2, 64)])
def test_order(tokens, k, experts, device, small_blocks):
    small_blocks("permutation", 16)
    choices = some_choices(tokens, k, experts, device)
    order = expert_order(choices, experts)
    flat = choices.reshape(-1).tolist()
    assert order.sizes.tolist() == [flat.count(e) for e in range(experts)]
    want = sorted(range(len(flat)), key=lambda c: flat[c] if flat[c] >= 0 else experts)  # stable
    assert order.slots.tolist() == want
    for choice, place in enumerate(order.places.reshape(-1).tolist()):
        assert place == (want.index(choice) if flat[choice] >= 0 else -1)


# ---- there and back


@pytest.mark.parametrize(("gated", "dtype"), [(True, F32), (False, F32), (True, BF16), (False, F16)])
def test_permute_and_unpermute(gated, dtype, device, small_blocks):
    """Each against sums in a plain loop; what a choice without an expert has is not looked at."""
    small_blocks("permutation", 32)
    choices = some_choices(11, 3, 4, device)
    order = expert_order(choices, 4)
    x, rows, gates = fresh((11, 2, 37), dtype, device), fresh((33, 37), dtype, device), torch.rand(11, 3, device=device)
    gates[order.places < 0] = torch.nan
    pairs = [(r, slot // 3, slot % 3) for r, slot in enumerate(order.slots.tolist()) if order.places.view(-1)[slot] >= 0]

    def there(x, gates=None):
        y = {r: x[t, 1] * (1 if gates is None else gates[t, j]) for r, t, j in pairs}
        return torch.stack([y[r] if r in y else torch.zeros_like(x[0, 1]) for r in range(33)])

    def back(rows, gates=None):
        sums = [torch.zeros_like(rows[0]) for _ in range(11)]
        for r, t, j in pairs:
            sums[t] = sums[t] + rows[r] * (1 if gates is None else gates[t, j])
        return torch.stack(sums)

    more = [gates.nan_to_num()] if gated else []
    compare(lambda x, *g: permute(x[:, 1], order, *g), there, [x, *more], BOUNDS[dtype])
    compare(lambda rows, *g: unpermute(rows, order, *g), back, [rows, *more], BOUNDS[dtype])
    if gated:
        assert permute(x[:, 1], order, gates).isfinite().all()
        assert unpermute(rows, order, gates).isfinite().all()
    kept = order._replace(slots=order.slots[: int(order.sizes.sum())])
    assert torch.equal(permute(x[:, 1], kept), permute(x[:, 1], order)[: len(kept.slots)])
    assert torch.equal(unpermute(rows[: len(kept.slots)], kept), unpermute(rows, order))


# ---- grouped products


def grouped64(x, w, sizes):
    parts = [rows @ m for rows, m in zip(x.split([*sizes, len(x) - sum(sizes)]), [*w, torch.zeros_like(w[0])], strict=True)]
    return torch.cat(parts)


SIZES = [[5, 0, 17, 1], [0, 0, 0], [40], [0, 3, 0, 20, 0]]


@pytest.mark.parametrize(("sizes", "turned", "dtype"), mixed(SIZES, [False, True], [F32, BF16, F16]))
def test_grouped_matmul(sizes, turned, dtype, device, small_blocks):
    """Rows beyond the last group, empty groups, weights as they are and as nn.Linear has them, inputs with gaps."""
    small_blocks("grouped", (16, 16, 16), "tile")
    n, depth, width = sum(sizes) + 3, 21, 34
    x = fresh((n, 2, depth), dtype, device)
    w = fresh((len(sizes), width, depth) if turned else (len(sizes), depth, width), dtype, device)
    counts = torch.tensor(sizes, device=device)

    def lay(w):
        return w.transpose(1, 2) if turned else w

    compare(
        lambda x, w: grouped_matmul(x[:, 1], lay(w), counts),
        lambda x, w: grouped64(x[:, 1], lay(w), sizes),
        [x, w],
        BOUNDS[dtype],
    )


@pytest.mark.parametrize(("depth", "width", "turned"), [(528, 80, False), (528, 80, True), (16, 16, True), (48, 96, False)])
def test_small_groups_of_matrices_of_any_size(depth, width, turned, device):
    """Widths that a CPU takes in vectors: tiles of all heights, rests, several pieces of the depth, a group of many rows, groups of none."""
    sizes = [300, 0, 1, 5, 33, 0, 17, 14, 0]
    n = sum(sizes) + 2
    x, counts = fresh((n, depth + 3), F32, device), torch.tensor(sizes, device=device)
    w = fresh((9, width, depth) if turned else (9, depth, width), F32, device)

    def lay(w):
        return w.transpose(1, 2) if turned else w

    compare(
        lambda x, w: grouped_matmul(x[:, :depth], lay(w), counts),
        lambda x, w: grouped64(x[:, :depth], lay(w), sizes),
        [x, w],
        BOUNDS[F32],
    )


@pytest.mark.parametrize("sizes", [[5, 4], [-1, 3]])
def test_rows_that_do_not_fit_are_refused(sizes):
    x, w, counts = torch.zeros(8, 16), torch.zeros(2, 16, 32), torch.tensor(sizes)
    with pytest.raises(ValueError, match="there are 8"):
        grouped_matmul(x, w, counts)
    with pytest.raises(ValueError, match="there are 8"):
        torch.ops.partita.grouped_outer(x, x, counts, False)


def test_small_groups_on_several_threads():
    """Bit for bit what one thread makes of them."""
    sizes = torch.tensor([70, 0, 3, 25])
    x, w = fresh((99, 544), F32, torch.device("cpu")), fresh((4, 96, 544), F32, torch.device("cpu"))
    one, three = (_with_gradients(lambda x, w: grouped_matmul(x, w.transpose(1, 2), sizes), x, w, threads) for threads in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def _with_gradients(f, x, w, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, w = (t.detach().requires_grad_() for t in (x, w))
        y = f(x, w)
        return [y.detach(), *torch.autograd.grad(y, (x, w), y.detach())]
    finally:
        torch.set_num_threads(before)


def test_grouped_gradient_of_a_sum(device):
    """Which is one number, expanded; and only the gradients that are wanted."""
    x, w, sizes = fresh((6, 4), F32, device), fresh((2, 4, 5), F32, device).requires_grad_(), torch.tensor([2, 4], device=device)
    grouped_matmul(x, w, sizes).sum().backward()
    want = torch.stack([x[:2].sum(0), x[2:].sum(0)])[:, :, None].expand(2, 4, 5)
    assert error(w.grad, want) < BOUNDS[F32]
    assert x.grad is None


def test_groups_that_do_not_fit_are_refused(device):
    x, w = torch.zeros(3, 4, device=device), torch.zeros(2, 4, 5, device=device)
    for bad in ((x, w, [1, 1, 1]), (x, w.transpose(1, 2), [1, 2]), (x.double(), w, [1, 2])):
        with pytest.raises(ValueError):
            grouped_matmul(*bad[:2], torch.tensor(bad[2], device=device))
    if device.type == "cpu" and grouped_matmul(x, w, torch.tensor([1, 2])) is not None:
        from partita_kernels.grouped import spans

        with pytest.raises(ValueError, match="groups have 4 rows, there are 3"):
            spans(torch.tensor([2, 2]), 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_stay_in_their_group(bad, device):
    x, w = fresh((7, 8), F32, device), fresh((3, 8, 6), F32, device)
    x[4, 2] = bad
    y = grouped_matmul(x, w, torch.tensor([2, 3, 2], device=device))
    assert (~y.isfinite()).any(1).tolist() == [False] * 4 + [True] + [False] * 2


# ---- a layer


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_layer_is_a_loop_over_tokens(dtype, device):
    """Experts of SwiGLU form; each token's answer is the sum of what its experts make of it."""
    tokens, width, inner, experts, k = 13, 12, 10, 6, 2
    shapes = [(tokens, width), (experts, width), (experts, width, 2 * inner), (experts, inner, width)]
    inputs = [fresh(s, dtype, device) * (1.0 if i == 0 else 0.3) for i, s in enumerate(shapes)]

    def ours(x, router, up, down):
        chosen, gates, _ = route((x.float() @ router.float().t()), k)
        order = expert_order(chosen, experts)
        rows = permute(x, order)
        hidden = swiglu(*grouped_matmul(rows, up, order.sizes).chunk(2, 1))
        return unpermute(grouped_matmul(hidden, down, order.sizes), order, gates)

    def plain(x, router, up, down):
        answers = []
        for row in x:
            best, chosen = (router @ row).topk(k)
            total = 0
            for share, e in zip(best.softmax(0), chosen.tolist()):
                gate, value = (row @ up[e]).chunk(2)
                total = total + share * ((gate * gate.sigmoid() * value) @ down[e])
            answers.append(total)
        return torch.stack(answers)

    compare(ours, plain, inputs, BOUNDS[dtype] * (1.5 if dtype == F32 else 3))  # rounded three times
