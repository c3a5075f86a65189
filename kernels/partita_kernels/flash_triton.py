"""Triton kernels of `attention` (Dao 2023): a tile of queries meets the keys between its lowest and its highest bound, tile by tile.

Scores are kept in powers of two. Gradients of keys are summed over all heads of queries that share them, in one program, so that nothing is added
atomically and results are the same each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from partita_kernels.jit import backend, cdiv, kernel, power_of_2

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

LOG2E = 1.4426950408889634
TILES = (128, 64)  # queries and keys of a forward tile, in two bytes an element
TILES_WIDE = (64, 32)  # the same for float32, which goes without matrix units
TILES_BACK = (64, 64)  # of the gradient of queries
TILES_KEYS = (32, 64)  # of the gradients of keys and values: twice as many sums
# Warps of a program, so that its registers suffice. A warp of AMD's has twice as many threads.
WARPS = {"cuda": {"forward": 8, "queries": 8, "keys": 8}, "hip": {"forward": 8, "queries": 4, "keys": 4}}
WIDEST = 256  # head that a tile holds


@kernel
def _tile(ptr, rows, count, stride, c, size):
    """Rows [ROWS, DIM] of a matrix; zeros outside."""
    return tl.load(
        ptr + rows.to(tl.int64)[:, None] * stride + c[None, :], mask=(rows < count)[:, None] & (c < size)[None, :], other=0.0
    )


@kernel
def _seen(j, lo, hi):
    return (j >= lo) & (j < hi)


@kernel
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr, high_ptr, scale, heads, shared, queries, keys, size, bound_b, qb, qh, qt, kb, kh, kt, vb, vh, vt,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head for each program. scale: of the scores in powers of two."""
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    b64 = b.to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    c = tl.arange(0, DIM)
    live = i < queries
    lo = tl.load(low_ptr + b64 * bound_b + i, mask=live, other=0)
    hi = tl.load(high_ptr + b64 * bound_b + i, mask=live, other=0)
    first = tl.min(tl.where(live, lo, keys), 0)
    last = tl.minimum(tl.max(hi, 0), keys)
    q = _tile(q_ptr + b64 * qb + h.to(tl.int64) * qh, i, queries, qt, c, size)
    k_ptr += b64 * kb + (h // shared).to(tl.int64) * kh
    v_ptr += b64 * vb + (h // shared).to(tl.int64) * vh
    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, DIM], tl.float32)
    for start in range(first // KEYS * KEYS, last, KEYS):
        j = start + tl.arange(0, KEYS)
        k = _tile(k_ptr, j, keys, kt, c, size)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        s = tl.where(_seen(j[None, :], lo[:, None], hi[:, None]), s, -float("inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, 1)
        v = _tile(v_ptr, j, keys, vt, c, size)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
        peak = higher
    nothing = total == 0.0
    out = out / tl.where(nothing, 1.0, total)[:, None]
    lse = tl.where(nothing, -float("inf"), (peak + tl.log2(total)) * 0.6931471805599453)
    row = tl.program_id(1).to(tl.int64) * queries + i
    tl.store(
        out_ptr + row[:, None] * size + c[None, :], out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c < size)[None, :]
    )
    tl.store(lse_ptr + row, lse, mask=live)


@kernel
def _delta(
    dout_ptr,
    out_ptr,
    dlse_ptr,
    delta_ptr,
    heads,
    queries,
    size,
    db,
    dh,
    dt,
    ob,
    oh,
    ot,
    lb,
    lh,
    lt,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
):
    """sum(dout * out) of each query, less the gradient of its log-sum-exp."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    c = tl.arange(0, DIM)
    d = _tile(dout_ptr + b * db + h * dh, i, queries, dt, c, size).to(tl.float32)
    o = _tile(out_ptr + b * ob + h * oh, i, queries, ot, c, size).to(tl.float32)
    dlse = tl.load(dlse_ptr + b * lb + h * lh + i.to(tl.int64) * lt, mask=i < queries, other=0.0)
    tl.store(delta_ptr + tl.program_id(1).to(tl.int64) * queries + i, tl.sum(d * o, 1) - dlse, mask=i < queries)


@kernel
def _backward_q(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, low_ptr, high_ptr, scale, out_scale, heads, shared, queries, keys, size, bound_b,
    db, dh, dt, qb, qh, qt, kb, kh, kt, vb, vh, vt, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head for each program."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    h64 = h.to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    c = tl.arange(0, DIM)
    live = i < queries
    lo = tl.load(low_ptr + b * bound_b + i, mask=live, other=0)
    hi = tl.load(high_ptr + b * bound_b + i, mask=live, other=0)
    first = tl.min(tl.where(live, lo, keys), 0)
    last = tl.minimum(tl.max(hi, 0), keys)
    row = tl.program_id(1).to(tl.int64) * queries + i
    lse = tl.load(lse_ptr + row, mask=live, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + row, mask=live, other=0.0)
    q = _tile(q_ptr + b * qb + h64 * qh, i, queries, qt, c, size)
    d = _tile(dout_ptr + b * db + h64 * dh, i, queries, dt, c, size)
    k_ptr += b * kb + (h // shared).to(tl.int64) * kh
    v_ptr += b * vb + (h // shared).to(tl.int64) * vh
    dq = tl.zeros([QUERIES, DIM], tl.float32)
    for start in range(first // KEYS * KEYS, last, KEYS):
        j = start + tl.arange(0, KEYS)
        k = _tile(k_ptr, j, keys, kt, c, size)
        v = _tile(v_ptr, j, keys, vt, c, size)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        p = tl.where(_seen(j[None, :], lo[:, None], hi[:, None]), tl.exp2(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(d, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(
        dq_ptr + row[:, None] * size + c[None, :],
        (dq * out_scale).to(dq_ptr.dtype.element_ty),
        mask=live[:, None] & (c < size)[None, :],
    )


@kernel
def _backward_kv(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, low_ptr, high_ptr, from_ptr, to_ptr, scale, out_scale, groups, shared, queries,
    keys, size, bound_b, turned_b, db, dh, dt, qb, qh, qt, kb, kh, kt, vb, vh, vt,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of keys for each program, and all heads of queries that share it. from, to: which queries see a key."""
    b = (tl.program_id(1) // groups).to(tl.int64)
    g = tl.program_id(1) % groups
    j = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    c = tl.arange(0, DIM)
    live = j < keys
    first = tl.min(tl.load(from_ptr + b * turned_b + j, mask=live, other=queries), 0)
    last = tl.max(tl.load(to_ptr + b * turned_b + j, mask=live, other=0), 0)
    k = _tile(k_ptr + b * kb + g.to(tl.int64) * kh, j, keys, kt, c, size)
    v = _tile(v_ptr + b * vb + g.to(tl.int64) * vh, j, keys, vt, c, size)
    dk = tl.zeros([KEYS, DIM], tl.float32)
    dv = tl.zeros([KEYS, DIM], tl.float32)
    for n in range(shared):
        h = (g * shared + n).to(tl.int64)
        base = (b * groups * shared + h) * queries
        for start in range(first // QUERIES * QUERIES, last, QUERIES):
            i = start + tl.arange(0, QUERIES)
            inside = i < queries
            lo = tl.load(low_ptr + b * bound_b + i, mask=inside, other=0)
            hi = tl.load(high_ptr + b * bound_b + i, mask=inside, other=0)
            lse = tl.load(lse_ptr + base + i, mask=inside, other=0.0) * 1.4426950408889634
            delta = tl.load(delta_ptr + base + i, mask=inside, other=0.0)
            q = _tile(q_ptr + b * qb + h * qh, i, queries, qt, c, size)
            d = _tile(dout_ptr + b * db + h * dh, i, queries, dt, c, size)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
            p = tl.where(_seen(j[:, None], lo[None, :], hi[None, :]), tl.exp2(s - lse[None, :]), 0.0)
            dv = tl.dot(p.to(d.dtype), d, dv, input_precision=PRECISION)
            ds = p * (tl.dot(v, tl.trans(d), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    at = (tl.program_id(1).to(tl.int64) * keys + j)[:, None] * size + c[None, :]
    there = live[:, None] & (c < size)[None, :]
    tl.store(dk_ptr + at, (dk * out_scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=there)


def _rows(t: Tensor) -> Tensor:
    """With neighbouring elements in the last dimension."""
    return t if t.stride(3) == 1 else t.contiguous()


def _constants(q: Tensor, tiles: tuple[int, int], queries: int, keys: int) -> dict[str, Any]:
    """Tiles of about the same bytes for every width of head and dtype, at least 16."""
    dim = max(16, power_of_2(q.shape[3]))
    share = max(1, dim * q.element_size() // 256) * q.element_size() // 2
    rows = [max(16, min(n // share, power_of_2(max(1, most)))) for n, most in zip(tiles, (queries, keys), strict=True)]
    precise = "tf32" if q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"QUERIES": rows[0], "KEYS": rows[1], "DIM": dim, "PRECISION": precise}


def _fallback(q: Tensor) -> bool:
    return q.dtype == torch.float64 or q.shape[3] > WIDEST


def triton(
    q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor, scale: float, tiles: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    if _fallback(q):
        from partita_kernels.flash import reference

        return reference(q, k, v, low, high, scale)
    q, k, v = map(_rows, (q, k, v))
    b, heads, queries, size = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    if out.numel():
        constants = _constants(q, tiles or (TILES if q.element_size() == 2 else TILES_WIDE), queries, k.shape[2])
        bound = low.stride(0) if low.shape[0] > 1 else 0
        _forward[(cdiv(queries, constants["QUERIES"]), b * heads)](
            q, k, v, out, lse, low, high, scale * LOG2E, heads, heads // k.shape[1], queries, k.shape[2], size, bound,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], **constants, num_warps=WARPS[backend()]["forward"], num_stages=2,
        )  # fmt: skip
    return out, lse


def triton_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, low: Tensor, high: Tensor, scale: float,
    tiles: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `reference_backward`."""
    if _fallback(q):
        from partita_kernels.flash import reference_backward

        return reference_backward(dout, dlse, q, k, v, out, lse, low, high, scale)
    q, k, v, dout, out, lse = *map(_rows, (q, k, v, dout.to(q.dtype), out)), lse.contiguous()
    b, heads, queries, size = q.shape
    groups, keys = k.shape[1], k.shape[2]
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    constants = _constants(q, tiles or TILES_BACK, queries, keys)
    bound = low.stride(0) if low.shape[0] > 1 else 0
    shapes, strides = (queries, keys, size), [s for t in (dout, q, k, v) for s in t.stride()[:3]]
    delta = torch.empty_like(lse)
    if q.numel():
        own = {name: constants[name] for name in ("QUERIES", "DIM")}
        _delta[(cdiv(queries, own["QUERIES"]), b * heads)](
            dout, out, dlse, delta, heads, queries, size, *dout.stride()[:3], *out.stride()[:3], *dlse.stride(), **own
        )
        _backward_q[(cdiv(queries, own["QUERIES"]), b * heads)](
            dout, q, k, v, lse, delta, dq, low, high, scale * LOG2E, scale, heads, heads // groups, *shapes, bound, *strides, **constants,
            num_warps=WARPS[backend()]["queries"], num_stages=2,
        )  # fmt: skip
    if k.numel():
        begin, end = _turned(low, high, keys)
        constants = _constants(q, tiles or TILES_KEYS, queries, keys)
        _backward_kv[(cdiv(keys, constants["KEYS"]), b * groups)](
            dout, q, k, v, lse, delta, dk, dv, low, high, begin, end, scale * LOG2E, scale, groups, heads // groups, *shapes, bound,
            keys if bound else 0, *strides, **constants, num_warps=WARPS[backend()]["keys"], num_stages=2,
        )  # fmt: skip
    return dq, dk, dv


def _turned(low: Tensor, high: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Which queries may see each key: those before `from` have ended, those from `to` on haven't begun. int32 [B or 1, S]."""
    j = torch.arange(keys, dtype=torch.int32, device=low.device).expand(low.shape[0], keys).contiguous()
    begin, end = torch.searchsorted(high, j, right=True), torch.searchsorted(low, j, right=True)
    return begin.int(), end.int()
