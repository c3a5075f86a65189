"""Triton kernels of `attention` (Dao 2023): a tile of queries meets the keys between its lowest and its highest bound, tile by tile.

Scores are kept in powers of two. Gradients of keys are summed over all heads of queries that share them, in one program, so that nothing is added
atomically and results are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from partita_kernels import tuning
from partita_kernels.jit import backend, cdiv, kernel, power_of_2

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor
Tile = tuning.Tile

LOG2E = 1.4426950408889634
WIDEST = 256  # head that a tile holds
# Queries and keys of a tile, in two bytes an element and heads of up to 128; warps, so that registers suffice; stages of loads. A warp of AMD's has twice as
# many threads. Gradients of keys and values are twice as many sums as those of queries. float32 goes without matrix units, so with half a tile each way.
TILES: dict[str, dict[str, Tile]] = {
    "cuda": {"forward": (128, 64, 8, 2), "queries": (64, 64, 8, 2), "keys": (32, 64, 8, 2)},
    "hip": {"forward": (128, 64, 8, 2), "queries": (64, 64, 4, 2), "keys": (32, 64, 4, 2)},
}
# What tuning tries beside the default. At heads of 128 a few need more registers or shared memory than some devices have: measured, they drop out.
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "forward": ((128, 128, 8, 2), (128, 32, 4, 3), (64, 64, 4, 3), (64, 32, 4, 3)),
    "queries": ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 3)),
    "keys": ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (16, 64, 4, 2)),
}


@kernel
def _tile(ptr, rows, count, stride, c, size):
    """Rows [ROWS, DIM] of a matrix; zeros outside."""
    return tl.load(
        ptr + rows.to(tl.int64)[:, None] * stride + c[None, :], mask=(rows < count)[:, None] & (c < size)[None, :], other=0.0
    )


@kernel
def _put(ptr, rows, live, c, size, values):
    """Rows of a contiguous matrix, in its dtype."""
    at = ptr + rows[:, None] * size + c[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=live[:, None] & (c < size)[None, :])


@kernel
def _bounds(low_ptr, high_ptr, i, live):
    """Of the keys that queries see."""
    return tl.load(low_ptr + i, mask=live, other=0), tl.load(high_ptr + i, mask=live, other=0)


@kernel
def _span(lo, hi, live, keys):
    """From the lowest to the highest bound of a tile's queries."""
    return tl.min(tl.where(live, lo, keys), 0), tl.minimum(tl.max(hi, 0), keys)


@kernel
def _seen(j, lo, hi):
    return (j >= lo) & (j < hi)


@kernel
def _sums(lse_ptr, delta_ptr, at, live):
    """(log-sum-exps in powers of two, sums of dout * out) of queries."""
    lse = tl.load(lse_ptr + at, mask=live, other=0.0) * 1.4426950408889634
    return lse, tl.load(delta_ptr + at, mask=live, other=0.0)


@kernel
def _weights(a, b, seen, lse, scale, PRECISION: tl.constexpr):
    """Of a tile of queries a and keys b, or the other way round."""
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
    return tl.where(seen, tl.exp2(s - lse), 0.0)


@kernel
def _slopes(p, a, b, delta, PRECISION: tl.constexpr):
    """Gradients of the scores before their factor, from weights p: of dout a and values b, or the other way round."""
    return p * (tl.dot(a, tl.trans(b), input_precision=PRECISION) - delta)


@kernel
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, low_ptr, high_ptr, scale, heads, shared, queries, keys, size, bound_b, qb, qh, qt, kb, kh, kt, vb, vh, vt,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head for each program. scale: of the scores in powers of two."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    c = tl.arange(0, DIM)
    live = i < queries
    lo, hi = _bounds(low_ptr, high_ptr, b * bound_b + i, live)
    first, last = _span(lo, hi, live, keys)
    q = _tile(q_ptr + b * qb + h.to(tl.int64) * qh, i, queries, qt, c, size)
    k_ptr += b * kb + (h // shared).to(tl.int64) * kh
    v_ptr += b * vb + (h // shared).to(tl.int64) * vh
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
    _put(out_ptr, row, live, c, size, out)
    tl.store(lse_ptr + row, lse, mask=live)


@kernel
def _delta(
    dout_ptr, out_ptr, dlse_ptr, delta_ptr, heads, queries, size, db, dh, dt, ob, oh, ot, lb, lh, lt, QUERIES: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
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
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    c = tl.arange(0, DIM)
    live = i < queries
    lo, hi = _bounds(low_ptr, high_ptr, b * bound_b + i, live)
    first, last = _span(lo, hi, live, keys)
    row = tl.program_id(1).to(tl.int64) * queries + i
    lse, delta = _sums(lse_ptr, delta_ptr, row, live)
    q = _tile(q_ptr + b * qb + h.to(tl.int64) * qh, i, queries, qt, c, size)
    d = _tile(dout_ptr + b * db + h.to(tl.int64) * dh, i, queries, dt, c, size)
    k_ptr += b * kb + (h // shared).to(tl.int64) * kh
    v_ptr += b * vb + (h // shared).to(tl.int64) * vh
    dq = tl.zeros([QUERIES, DIM], tl.float32)
    for start in range(first // KEYS * KEYS, last, KEYS):
        j = start + tl.arange(0, KEYS)
        k = _tile(k_ptr, j, keys, kt, c, size)
        v = _tile(v_ptr, j, keys, vt, c, size)
        p = _weights(q, k, _seen(j[None, :], lo[:, None], hi[:, None]), lse[:, None], scale, PRECISION)
        ds = _slopes(p, d, v, delta[:, None], PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    _put(dq_ptr, row, live, c, size, dq * out_scale)


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
            lo, hi = _bounds(low_ptr, high_ptr, b * bound_b + i, inside)
            lse, delta = _sums(lse_ptr, delta_ptr, base + i, inside)
            q = _tile(q_ptr + b * qb + h * qh, i, queries, qt, c, size)
            d = _tile(dout_ptr + b * db + h * dh, i, queries, dt, c, size)
            p = _weights(k, q, _seen(j[:, None], lo[None, :], hi[None, :]), lse[None, :], scale, PRECISION)
            dv = tl.dot(p.to(d.dtype), d, dv, input_precision=PRECISION)
            ds = _slopes(p, v, d, delta[None, :], PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    row = tl.program_id(1).to(tl.int64) * keys + j
    _put(dk_ptr, row, live, c, size, dk * out_scale)
    _put(dv_ptr, row, live, c, size, dv)


def _rows(t: Tensor) -> Tensor:
    """With neighbouring elements in the last dimension."""
    return t if t.stride(3) == 1 else t.contiguous()


def _constants(q: Tensor, tile: Tile, queries: int, keys: int) -> dict[str, Any]:
    """Of a launch. Tiles have about the same bytes for every width of head and dtype, at least 16 rows, and not many more than there are."""
    dim = max(16, power_of_2(q.shape[3]))
    share = max(1, dim * q.element_size() // 256) * q.element_size() // 2
    rows = [max(16, min(n // share, power_of_2(max(1, most)))) for n, most in zip(tile[:2], (queries, keys), strict=True)]
    precise = "tf32" if q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
    sizes = {"QUERIES": rows[0], "KEYS": rows[1], "DIM": dim, "PRECISION": precise}
    return {**sizes, "num_warps": tile[2], "num_stages": tile[3]}


def _launch(pass_: str, q: Tensor, keys: int, tiles: tuple[int, int] | None, launch: Callable[[dict[str, Any]], Any]) -> None:
    """launch(constants) with the tile that `tuning` gives for a pass of CANDIDATES. tiles: queries and keys, in the place of that."""
    default = TILES[backend()][pass_]
    if pass_ == "forward" and q.element_size() > 2:
        default = (64, 32, *default[2:])
    shape = q.shape[2], keys

    def run(tile: Tile) -> None:
        launch(_constants(q, tile, *shape))

    if tiles is not None:
        return run((*tiles, *default[2:]))
    return run(tuning.tile(f"attention_{pass_}", q, (*shape, q.shape[3]), default, CANDIDATES[pass_], run))


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
    bound = low.stride(0) if low.shape[0] > 1 else 0
    numbers = scale * LOG2E, heads, heads // k.shape[1], queries, k.shape[2], size, bound
    strides = [s for t in (q, k, v) for s in t.stride()[:3]]

    def launch(constants: dict[str, Any]) -> None:
        grid = cdiv(queries, constants["QUERIES"]), b * heads
        _forward[grid](q, k, v, out, lse, low, high, *numbers, *strides, **constants)

    if out.numel():
        _launch("forward", q, k.shape[2], tiles, launch)
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
    bound = low.stride(0) if low.shape[0] > 1 else 0
    shared, shapes = heads // groups, (queries, keys, size)
    strides = [s for t in (dout, q, k, v) for s in t.stride()[:3]]
    delta = torch.empty_like(lse)
    inputs, factors = (dout, q, k, v, lse, delta), (scale * LOG2E, scale)

    def sums(constants: dict[str, Any]) -> None:
        more = {name: constants[name] for name in ("QUERIES", "DIM")}
        grid = cdiv(queries, more["QUERIES"]), b * heads
        _delta[grid](dout, out, dlse, delta, heads, queries, size, *dout.stride()[:3], *out.stride()[:3], *dlse.stride(), **more)

    def of_queries(constants: dict[str, Any]) -> None:
        grid = cdiv(queries, constants["QUERIES"]), b * heads
        _backward_q[grid](*inputs, dq, low, high, *factors, heads, shared, *shapes, bound, *strides, **constants)

    def of_keys(constants: dict[str, Any]) -> None:
        grid = cdiv(keys, constants["KEYS"]), b * groups
        turned = keys if bound else 0
        _backward_kv[grid](
            *inputs, dk, dv, low, high, begin, end, *factors, groups, shared, *shapes, bound, turned, *strides, **constants
        )

    if q.numel():
        sums(_constants(q, TILES[backend()]["queries"] if tiles is None else (*tiles, 4, 2), queries, keys))
        _launch("queries", q, keys, tiles, of_queries)
    if k.numel():
        begin, end = _turned(low, high, keys)
        _launch("keys", q, keys, tiles, of_keys)
    return dq, dk, dv


def _turned(low: Tensor, high: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Which queries may see each key: those before `from` have ended, those from `to` on haven't begun. int32 [B or 1, S]."""
    j = torch.arange(keys, dtype=torch.int32, device=low.device).expand(low.shape[0], keys).contiguous()
    begin, end = torch.searchsorted(high, j, right=True), torch.searchsorted(low, j, right=True)
    return begin.int(), end.int()
