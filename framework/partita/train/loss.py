"""Token losses (slot `loss`): sums and counts, so that a mean can be made once over everything."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE = -100


def token_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of logits [B, T, V] against labels [B, T]; label -100 doesn't count.

    Returns (sum in float32, number of counted tokens in int64); the sum is 0, with a gradient of 0, where nothing counts.
    label_smoothing: Szegedy et al. 2016, section 7. z_loss: weight of log(Z)^2 (Chowdhery et al. 2022, section 5).
    """
    flat, target = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    total = F.cross_entropy(flat, target, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing)
    counted = target != IGNORE
    if z_loss:
        total = total + z_loss * (torch.logsumexp(flat, dim=-1).square() * counted).sum()
    return total, counted.sum()
