"""Attention where each query sees an interval of keys, with its log-sum-exp: causal, sliding windows, packed documents, grouped heads, pieces of a ring.

Query i sees keys low[i] <= j < high[i]; neither bound falls with i. With s_ij = scale q_i k_j, l_i = log sum exp s_ij: out_i = sum exp (s_ij - l_i) v_j.
A query that sees nothing has out 0 and l = -inf. Backward needs l and the sum of dout * out only, be they of these keys or of all of them
(Dao et al. 2022, section B.2): so pieces of a ring work too. Several heads of queries may share a head of keys (Ainslie et al. 2023).
"""

from __future__ import annotations

import torch

from partita_kernels.dispatch import Operation
from partita_kernels.flash_triton import triton, triton_backward
from partita_kernels.rows import wide

Tensor = torch.Tensor
Three = tuple[Tensor, Tensor, Tensor]

CHUNK = 1 << 22  # scores at a time in plain torch


def attention(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D], k and v [B, G, S, D] with H a multiple of G, int32 low and high [B or 1, T] (`visible`).

    Returns out [B, H, T, D] in the dtype of q and log-sum-exps [B, H, T], float32 (float64 for float64). Both are differentiable.
    scale: D ** -0.5 by default. Raises ValueError where shapes don't fit.
    """
    check(q, k, v, low, high)
    return torch.ops.partita.attention(q, k, v, low, high, q.shape[-1] ** -0.5 if scale is None else scale)


def attention_piece(
    q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`attention` over some of the keys, for an autograd function of one's own: no gradients, and outputs of any strides."""
    check(q, k, v, low, high)
    operation = torch.ops.partita.attention if torch.compiler.is_compiling() else ATTENTION.on(q.device)
    out, lse = operation(q, k, v, low.contiguous(), high.contiguous(), q.shape[-1] ** -0.5 if scale is None else scale)
    return out, lse


def attention_piece_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, low: Tensor, high: Tensor, scale: float | None = None
) -> Three:
    """The share that these keys have in the gradients of q, k and v, where `out` and `lse` are those of all keys. In the dtypes of q, k, v."""
    check(q, k, v, low, high)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operation = torch.ops.partita.attention_backward if torch.compiler.is_compiling() else ATTENTION_BACKWARD.on(q.device)
    dq, dk, dv = operation(
        dout, torch.zeros_like(lse), q, k, v, out, lse.contiguous(), low.contiguous(), high.contiguous(), scale
    )
    return dq, dk, dv


def check(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor) -> None:
    """Raises ValueError where shapes don't fit."""
    heads, bounds = (q.shape[1], k.shape[1]), ((1, q.shape[2]), (q.shape[0], q.shape[2]))
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or heads[0] % heads[1]:
        raise ValueError(f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if low.shape != high.shape or tuple(low.shape) not in bounds or low.dtype != torch.int32 or high.dtype != torch.int32:
        raise ValueError(f"attention: low {low.dtype} {tuple(low.shape)}, high {tuple(high.shape)} (int32 [B or 1, T] is wanted)")


def visible(
    queries: Tensor, keys: Tensor, *, causal: bool = True, window: int | None = None, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(low, high) int32 [1, T] for queries and keys at ascending int64 positions [T] and [S] of one sequence.

    window: a query sees that many positions at most, its own and those before it; without causal as many after it, too. documents: int64
    [D + 1], position of the first token of each of D documents, then the end of the last (cu_seqlens); a query sees its own document only.
    """
    first, last = torch.full_like(queries, torch.iinfo(torch.int64).min), torch.full_like(queries, torch.iinfo(torch.int64).max)
    if causal:
        last = queries
    if window is not None:
        first = queries - (window - 1)
        last = last if causal else queries + (window - 1)
    if documents is not None:
        which = torch.searchsorted(documents, queries, right=True)
        first = torch.maximum(first, documents[(which - 1).clamp(min=0)])
        last = torch.minimum(last, documents[which.clamp(max=len(documents) - 1)] - 1)
    low = torch.searchsorted(keys, first)
    high = torch.maximum(torch.searchsorted(keys, last, right=True), low)
    return low[None].int(), high[None].int()


# ---- plain torch


def _scores(q: Tensor, k: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """q [B, G, H / G, t, D], k [B, G, S, D] -> scores, -inf where a key isn't seen."""
    scores = (wide(q) @ wide(k)[:, :, None].transpose(-1, -2)) * scale
    j = torch.arange(k.shape[2], device=k.device)
    seen = (j >= low[:, :, None]) & (j < high[:, :, None])
    return scores.masked_fill_(~seen[:, None, None], -torch.inf)


def _pieces(q: Tensor, k: Tensor) -> list[slice]:
    """Queries at a time."""
    rows = max(1, CHUNK // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(i, i + rows) for i in range(0, q.shape[2], rows)]


def _grouped(t: Tensor, k: Tensor) -> Tensor:
    """[B, H, ...] as [B, G, H / G, ...]."""
    return t.unflatten(1, (k.shape[1], -1))


def reference(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `attention`."""
    out, lse = torch.empty_like(q), wide(q.new_empty(0)).new_empty(q.shape[:3])
    for at in _pieces(q, k):
        scores = _scores(_grouped(q[:, :, at], k), k, low[:, at], high[:, at], scale)
        each = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(each.masked_fill(each == -torch.inf, 0.0)).exp_()
        out[:, :, at] = (weights @ wide(v)[:, :, None]).flatten(1, 2).to(q.dtype)
        lse[:, :, at] = each.squeeze(-1).flatten(1, 2)
    return out, lse


def reference_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, low: Tensor, high: Tensor, scale: float
) -> Three:
    """Gradients of q, k and v."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(wide(k)), torch.zeros_like(wide(v))
    delta = (wide(dout) * wide(out)).sum(-1) - dlse
    for at in _pieces(q, k):
        x, d, z, less = (_grouped(t[:, :, at], k) for t in (q, dout, lse, delta))
        scores = _scores(x, k, low[:, at], high[:, at], scale)
        weights = scores.sub_(z.masked_fill(z == -torch.inf, 0.0)[..., None]).exp_()
        ds = wide(d) @ wide(v)[:, :, None].transpose(-1, -2)
        dv += (weights.transpose(-1, -2) @ wide(d)).sum(2)
        ds = ds.sub_(less[..., None]).mul_(weights).mul_(scale)
        dq[:, :, at] = (ds @ wide(k)[:, :, None]).flatten(1, 2).to(q.dtype)
        dk += (ds.transpose(-1, -2) @ wide(x)).sum(2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


# ---- CPU: torch's fused kernels, which hold a tile of scores at a time


def _fits(q: Tensor, k: Tensor, low: Tensor, high: Tensor) -> bool:
    """torch's kernels want some keys for each query."""
    return q.numel() > 0 and k.numel() > 0 and bool((low < high).all())


def _mask(q: Tensor, k: Tensor, low: Tensor, high: Tensor) -> tuple[bool, Tensor | None]:
    """(causal, mask): a mask where it is needed, as numbers to add."""
    queries, keys = q.shape[2], k.shape[2]
    if not bool(low.any()):
        if bool((high == keys).all()):
            return False, None
        if queries == keys and torch.equal(high, torch.arange(1, keys + 1, dtype=torch.int32).expand_as(high)):
            return True, None
    j = torch.arange(keys, dtype=torch.int32)
    seen = (j >= low[:, :, None]) & (j < high[:, :, None])
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    return False, mask[:, None].expand(q.shape[0], q.shape[1], queries, keys)


def _spread(t: Tensor, heads: int) -> Tensor:
    """Keys or values for each head of queries."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], dim=1)


def cpu(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    if not _fits(q, k, low, high):
        return reference(q, k, v, low, high, scale)
    causal, mask = _mask(q, k, low, high)
    keys, values = (_spread(t, q.shape[1]) for t in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def cpu_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, low: Tensor, high: Tensor, scale: float
) -> Three:
    """As `reference_backward`; torch's kernel takes no gradient of the log-sum-exps."""
    if not _fits(q, k, low, high) or bool(dlse.any()):
        return reference_backward(dout, dlse, q, k, v, out, lse, low, high, scale)
    causal, mask = _mask(q, k, low, high)
    keys, values = (_spread(t, q.shape[1]) for t in (k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.to(q.dtype), q, keys, values, out.to(q.dtype), lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    if k.shape[1] != q.shape[1]:
        dk, dv = (wide(_grouped(t, k)).sum(2).to(k.dtype) for t in (dk, dv))
    return dq, dk, dv


# ---- one operation

ATTENTION = Operation("attention", reference, triton, cpu)
ATTENTION_BACKWARD = Operation("attention_backward", reference_backward, triton_backward, cpu_backward)


@torch.library.custom_op(
    "partita::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor low, Tensor high, float scale) -> (Tensor, Tensor)",
)
def _attention(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = ATTENTION.on(q.device)(q, k, v, low.contiguous(), high.contiguous(), scale)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op(
    "partita::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor low, Tensor high, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, low: Tensor, high: Tensor, scale: float
) -> Three:
    grads = ATTENTION_BACKWARD.on(q.device)(dout, dlse, q, k, v, out, lse, low.contiguous(), high.contiguous(), scale)
    dq, dk, dv = (g.contiguous() for g in grads)
    return dq, dk, dv


@_attention.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@_attention_backward.register_fake
def _attention_backward_fake(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, low: Tensor, high: Tensor, scale: float
) -> Three:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, low, high, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, low, high)


def _differentiate(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    return *torch.ops.partita.attention_backward(dout, dlse, *ctx.saved_tensors, ctx.scale), None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)
