"""Cross entropy against its definition."""

from __future__ import annotations

import pytest
import torch

from partita.train.loss import token_cross_entropy


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float().requires_grad_()


LABELS = torch.tensor([[0, 3, -100, 6, 2], [-100, -100, 1, 5, -100]])


def test_sum_and_count(logits: torch.Tensor) -> None:
    total, counted = token_cross_entropy(logits, LABELS)
    logs = logits.detach().double().log_softmax(-1)
    want = -sum(logs[i, j, LABELS[i, j]] for i in range(2) for j in range(5) if LABELS[i, j] != -100)
    assert counted.item() == 6
    assert (total.dtype, counted.dtype, total.ndim) == (torch.float32, torch.int64, 0)
    assert total.item() == pytest.approx(float(want), rel=1e-6)


def test_smoothing_and_z_loss(logits: torch.Tensor) -> None:
    total, _ = token_cross_entropy(logits, LABELS, label_smoothing=0.1, z_loss=0.01)
    exact = logits.detach().double()
    logs, z = exact.log_softmax(-1), exact.logsumexp(-1)
    want = 0.0
    for i in range(2):
        for j in range(5):
            if LABELS[i, j] != -100:
                want -= float(0.9 * logs[i, j, LABELS[i, j]] + 0.1 * logs[i, j].mean())
                want += 0.01 * float(z[i, j]) ** 2
    assert total.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}])
def test_nothing_counted_is_zero(logits: torch.Tensor, options: dict[str, float]) -> None:
    total, counted = token_cross_entropy(logits, torch.full((2, 5), -100), **options)
    total.backward()
    assert (total.item(), counted.item()) == (0.0, 0)
    assert not logits.grad.any()


def test_halves_add_up(logits: torch.Tensor) -> None:
    whole, n = token_cross_entropy(logits, LABELS, z_loss=0.1)
    parts = [token_cross_entropy(logits[i : i + 1], LABELS[i : i + 1], z_loss=0.1) for i in range(2)]
    assert sum(p[0] for p in parts).item() == pytest.approx(whole.item(), rel=1e-6)
    assert sum(p[1] for p in parts).item() == n.item()


def test_bf16_logits_are_summed_in_float32(logits: torch.Tensor) -> None:
    half = logits.detach().to(torch.bfloat16).requires_grad_()
    total, _ = token_cross_entropy(half, LABELS)
    total.backward()
    assert total.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16
    assert total.item() == pytest.approx(token_cross_entropy(half.detach().float(), LABELS)[0].item())
