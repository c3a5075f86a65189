"""Losses of the slot `loss`: a sum and what it is a sum over. They are divided once, by the count of the whole update."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import partita_kernels
from partita.models.layers import fused

IGNORED = -100


def token_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of logits [..., V] with labels [...] (int64, -100 is not counted): (float32 sum, int64 count), both 0-d.

    label_smoothing: share of the target spread evenly over all V (Szegedy et al. 2016). z_loss: weight of log(Z)^2, Z the sum of
    exponentials (Chowdhery et al. 2022, section 5). Both are part of the sum. Without any counted label the sum is 0, and so are
    its gradients.
    """
    if fused(logits):
        return partita_kernels.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=label_smoothing, z_loss=z_loss)
    flat, target = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    counted = target != IGNORED
    total = F.cross_entropy(flat, target, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        log_z = torch.logsumexp(flat, dim=-1)
        total = total + z_loss * log_z.square().masked_fill(~counted, 0.0).sum()
    return total, counted.sum()


# The batch already says what counts: shifted labels for a causal model, masked places for a masked one.
causal = masked = token_cross_entropy
