"""Attention of some queries on some keys, with what is needed to put such pieces together: log-sum-exps, and a backward from them.

Softmax over all keys follows from pieces (Milakov and Gimelshein 2018): with l = log sum exp of a piece's scores,
out = sum exp(l_i - l) out_i, where l = log sum exp l_i. Backward needs only l and D = sum(dout * out) of the whole
(Dao et al. 2022, section B.2).
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

ROWS = 1024  # queries at a time of the plain form: bounds its matrix of scores


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """q [B, H, M, D], k and v [B, H, N, D] -> (out [B, H, M, D], log-sum-exps [B, H, M]), both float32.

    visible: bool [B, 1, M, N], or None for all; causal: M = N, and a query sees no later key (`visible` knows of it already).
    A query that sees nothing has out 0 and log-sum-exp -inf.
    """
    if visible is None and q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out.float(), lse.float()
    outs, sums = [], []
    for i in range(0, q.shape[2], ROWS):
        scores = _scores(q, k, visible, causal, i)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        outs.append((weights.to(v.dtype) @ v).float())
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (float32) of q, k, v for the share of these keys, where `out` and `lse` are those of all keys."""
    if visible is None and q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out.to(q.dtype), lse, 0.0, causal
        )
        return grads[0].float(), grads[1].float(), grads[2].float()
    scale = q.shape[-1] ** -0.5
    kf, vf = k.float(), v.float()
    delta = (dout.float() * out.float()).sum(-1, keepdim=True)
    dqs, dk, dv = [], torch.zeros_like(kf), torch.zeros_like(vf)
    for i in range(0, q.shape[2], ROWS):
        rows = slice(i, i + ROWS)
        weights = (_scores(q, k, visible, causal, i) - lse[:, :, rows].unsqueeze(-1)).exp_()
        d = dout[:, :, rows].float()
        dv += weights.transpose(-1, -2) @ d
        ds = weights * (d @ vf.transpose(-1, -2) - delta[:, :, rows]) * scale
        dqs.append(ds @ kf)
        dk += ds.transpose(-1, -2) @ q[:, :, rows].float()
    return torch.cat(dqs, 2), dk, dv


def _scores(q: Tensor, k: Tensor, visible: Tensor | None, causal: bool, first: int) -> Tensor:
    """Scaled scores [B, H, <= ROWS, N] of the queries from `first` on, float32, -inf where a key isn't seen."""
    rows = q[:, :, first : first + ROWS]
    scores = (rows @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if visible is not None:
        return scores.masked_fill_(~visible[:, :, first : first + ROWS], -torch.inf)
    if causal:
        later = torch.ones(rows.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(first + 1)
        return scores.masked_fill_(later, -torch.inf)
    return scores


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two pieces over disjoint keys as one. In the first, each query has seen something."""
    total = torch.logaddexp(lse, more_lse)
    return out * (lse - total).exp().unsqueeze(-1) + more * (more_lse - total).exp().unsqueeze(-1), total
