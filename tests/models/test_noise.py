"""Dropout from a counter: the right share, no pattern, no layout."""

from __future__ import annotations

import pytest
import torch
from small_models import VOCAB, build

from partita.models.noise import Noise, dropout, dropped, uniform
from partita.train.loss import token_cross_entropy

B, T, C = 16, 64, 256


def mask(p: float = 0.5, layer: int = 3, seed: int = 7, step: int = 11, first: int = 0) -> torch.Tensor:
    return dropped(torch.empty(B, T, C), p, Noise(seed, step, torch.arange(first, first + B)), layer)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_zeros(p: float) -> None:
    dropped_share = mask(p).double().mean().item()
    assert abs(dropped_share - p) < 5 * (p * (1 - p) / (B * T * C)) ** 0.5


def test_share_holds_for_each_sample_token_and_channel() -> None:
    m = mask(0.3).double()
    for dims in ((1, 2), (0, 2), (0, 1)):
        means = m.mean(dims)
        sigma = (0.21 / (m.numel() / means.numel())) ** 0.5
        assert (means - 0.3).abs().max() < 5 * sigma
        assert means.std() == pytest.approx(sigma, rel=0.4)


def test_neighbours_are_independent() -> None:
    m = mask().double() - 0.5
    bound = 5 * 0.25 / (B * T * C) ** 0.5
    for other in (
        m.roll(1, 0),
        m.roll(1, 1),
        m.roll(1, 2),
        m.roll(2, 2),
        m.roll((1, 1), (1, 2)),
        m.roll((1, -1), (1, 2)),
        mask(layer=4).double() - 0.5,
        mask(step=12).double() - 0.5,
        mask(seed=8).double() - 0.5,
        mask(first=B).double() - 0.5,
    ):
        assert (m * other).mean().abs() < bound


def test_all_pairs_of_channels_are_independent() -> None:
    m = mask().double().reshape(B * T, C) - 0.5
    correlation = (m.T @ m) / (B * T * 0.25)
    off = correlation[~torch.eye(C, dtype=torch.bool)]
    assert off.abs().max() < 6 / (B * T) ** 0.5
    assert off.std() == pytest.approx((B * T) ** -0.5, rel=0.1)


def test_any_split_of_the_batch_gives_the_same() -> None:
    whole = mask()
    x = torch.empty(4, T, C)
    parts = [dropped(x, 0.5, Noise(7, 11, torch.arange(i, i + 4)), 3) for i in range(0, B, 4)]
    assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dropped(torch.empty(B, T, C), 0.5, Noise(7, 11, order), 3), whole[order])


def test_any_split_of_the_tokens_gives_the_same() -> None:
    whole = mask()
    x = torch.empty(B, T // 2, C)
    columns = torch.arange(T).view(2, -1)
    parts = [dropped(x, 0.5, Noise(7, 11, torch.arange(B), part), 3) for part in columns]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_a_longer_sequence_or_wider_model_begins_alike() -> None:
    assert torch.equal(dropped(torch.empty(B, 8, 16), 0.5, Noise(7, 11, torch.arange(B)), 3), mask()[:, :8, :16])


def test_numbers_between_are_even_and_of_no_layout() -> None:
    """Mean 0 and variance 1/3, as many in each of 64 parts, and the same for any split of batch and tokens."""
    whole = uniform(torch.empty(B, T, C), Noise(7, 11, torch.arange(B)), 3)
    n = whole.numel()
    assert whole.dtype == torch.float32 and float(whole.abs().max()) <= 1.0
    assert abs(whole.double().mean().item()) < 5 * (1 / 3 / n) ** 0.5
    assert whole.double().square().mean().item() == pytest.approx(1 / 3, abs=5 * (4 / 45 / n) ** 0.5)
    counts = torch.histc(whole, 64, -1.0, 1.0)
    assert (counts - n / 64).abs().max() < 5 * (n / 64) ** 0.5
    part = uniform(torch.empty(3, 8, C), Noise(7, 11, torch.arange(5, 8), torch.arange(8, 16)), 3)
    assert torch.equal(part, whole[5:8, 8:16])


def test_large_numbers() -> None:
    sample = torch.tensor([2**62, 2**62 + 1, -1])
    m = dropped(torch.empty(3, T, C), 0.5, Noise(2**70, 10**12, sample), 10**6)
    assert m.double().mean().item() == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(m[0], m[1])


def test_values_and_gradient() -> None:
    x = torch.ones(B, T, C, requires_grad=True)
    noise = Noise(7, 11, torch.arange(B))
    y = dropout(x, 0.25, noise, 0)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert y.detach().unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert y.mean().item() == pytest.approx(1.0, abs=0.01)


def test_nothing_to_drop_is_the_tensor_itself() -> None:
    x = torch.ones(1, 2, 3)
    assert dropout(x, 0.0, Noise(1, 1, torch.arange(1)), 0) is x
    assert dropout(x, 0.5, None, 0) is x


def test_works_on_meta_and_in_bf16() -> None:
    x = torch.empty(2, 4, 8, device="meta")
    assert dropout(x, 0.5, Noise(1, 1, torch.arange(2, device="meta")), 0).is_meta
    assert dropout(torch.ones(2, 4, 8, dtype=torch.bfloat16), 0.5, Noise(1, 1, torch.arange(2)), 0).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_gradients_of_a_model_do_not_depend_on_micro_batches(name: str, ids: torch.Tensor) -> None:
    model = build(name, dropout=0.2).train()
    gradients = []
    for cut in (3, 1):
        model.zero_grad()
        for rows in torch.arange(3).split(cut):
            total, _ = token_cross_entropy(model(ids[rows], noise=Noise(1, 2, rows + 40)), ids[rows])
            total.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(model(ids, noise=Noise(1, 2, torch.arange(3))), model(ids), atol=1e-4)
        assert model(ids).shape == (3, 16, VOCAB)
