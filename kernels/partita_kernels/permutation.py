"""Tokens to rows that lie by expert and back, with gates: `permute` and `unpermute` are transposes of each other, so each is the other's gradient.

`expert_order` sorts choices once, by counting: row r is choice slots[r] = t * k + j of token t, and choice j of token t is row places[t, j].
Sums over a token's choices run in the order of the choices, in float32, so that results are the same each time: nothing is added atomically.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel, power_of_2
from partita_kernels.rows import as_rows, wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

BLOCK = 1024  # elements of a row at a time of a Triton program
CHOICES = 64  # that a Triton program sorts
TILE = 8192  # the same times experts, at most


class Order(NamedTuple):
    """slots int64 [T * k]: the choice that a row is; those without an expert come last. places int64 [T, k]: the row of a choice, -1
    without an expert. sizes int64 [E]: rows of each expert."""

    slots: Tensor
    places: Tensor
    sizes: Tensor


def expert_order(experts: Tensor, count: int) -> Order:
    """How choices int64 [T, k] among `count` experts lie when sorted by expert, in their own order within one.

    A choice outside of 0..count-1 (-1, say, where an expert has no room) has no expert. Never waits for a device.
    """
    return Order(*torch.ops.partita.expert_order(experts, count))


def permute(x: Tensor, order: Order, gates: Tensor | None = None) -> Tensor:
    """x [T, C] -> rows [len(order.slots), C]: row r is token slots[r] // k, times its gate if there are gates float32 [T, k].

    Rows of choices without an expert are zeros; where their number is known, order.slots may be cut to leave them out.
    """
    return torch.ops.partita.permute(x, order.slots, order.places, gates)


def unpermute(rows: Tensor, order: Order, gates: Tensor | None = None) -> Tensor:
    """rows [n, C] -> [T, C]: the sum of a token's rows, times their gates if there are gates float32 [T, k]; without any, zeros."""
    return torch.ops.partita.unpermute(rows, order.slots, order.places, gates)


# ---- plain torch


def reference_order(experts: Tensor, count: int) -> Order:
    """As `expert_order`."""
    flat = experts.reshape(-1)
    group = flat.where((flat >= 0) & (flat < count), count)
    slots = group.argsort(stable=True)
    places = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=slots.device))
    places = places.masked_fill(group == count, -1).view(experts.shape)
    return Order(slots, places, torch.bincount(group, minlength=count + 1)[:count])


def reference(x: Tensor, slots: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    """As `permute`."""
    rows = x.index_select(0, slots // places.shape[1])
    if gates is not None:
        rows = (wide(rows) * gates.reshape(-1)[slots][:, None]).to(x.dtype)
    return rows.masked_fill((places.reshape(-1)[slots] < 0)[:, None], 0.0)


def reference_back(rows: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    """As `unpermute`."""
    total = wide(rows.new_zeros(places.shape[0], rows.shape[1]))
    for j in range(places.shape[1]):
        picked = _picked(rows, places[:, j])
        total += picked if gates is None else picked * gates[:, j, None].masked_fill(places[:, j, None] < 0, 0.0)
    return total.to(rows.dtype)


def reference_dots(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """x [T, C], rows [n, C] -> [T, k]: each token's product with its rows, 0 without one; float32, or float64 for float64."""
    dots = [(_picked(rows, places[:, j]) * wide(x)).sum(1) for j in range(places.shape[1])]
    return torch.stack(dots, 1)


def _picked(rows: Tensor, places: Tensor) -> Tensor:
    """The row at each place, zeros where there is none."""
    there = (places >= 0) & (places < len(rows))
    if not len(rows):
        return wide(rows.new_zeros(len(places), rows.shape[1]))
    return wide(rows.index_select(0, places.where(there, 0))).masked_fill(~there[:, None], 0.0)


# ---- Triton


@kernel
def _count(experts_ptr, counts_ptr, n, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[program, expert] over a program's choices; the last column has those without an expert."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(experts_ptr + at, mask=at < n, other=-1)
    e = tl.where((e >= 0) & (e < count), e, count).to(tl.int32)
    which = tl.arange(0, EXPERTS)
    ones = ((e[:, None] == which[None, :]) & (at < n)[:, None]).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0) * (count + 1) + which, tl.sum(ones, 0), mask=which <= count)


@kernel
def _place(experts_ptr, starts_ptr, slots_ptr, places_ptr, n, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """starts[program, expert]: the row of the program's first choice of that expert."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(experts_ptr + at, mask=at < n, other=-1)
    e = tl.where((e >= 0) & (e < count), e, count).to(tl.int32)
    which = tl.arange(0, EXPERTS)
    mine = e[:, None] == which[None, :]
    before = tl.cumsum(mine.to(tl.int32), 0) - 1
    start = tl.load(starts_ptr + tl.program_id(0) * (count + 1) + which, mask=which <= count, other=0).to(tl.int32)
    row = tl.sum(tl.where(mine, before + start[None, :], 0), 1).to(tl.int64)
    tl.store(slots_ptr + row, at.to(tl.int64), mask=at < n)
    tl.store(places_ptr + at, tl.where(e < count, row, -1), mask=at < n)


@kernel
def _gather(x_ptr, slots_ptr, places_ptr, gates_ptr, y_ptr, k, n, x_stride, GATES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row)
    there = tl.load(places_ptr + slot) >= 0
    x = tl.load(x_ptr + (slot // k) * x_stride + c, mask=c < tl.where(there, n, 0), other=0.0).to(tl.float32)
    if GATES:
        x = tl.where(there, x * tl.load(gates_ptr + slot), 0.0)  # a choice without an expert gives zeros, whatever its gate
    tl.store(y_ptr + row * n + c, x.to(y_ptr.dtype.element_ty), mask=c < n)


@kernel
def _combine(rows_ptr, places_ptr, gates_ptr, y_ptr, k, n, count, stride, GATES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(k):
        place = tl.load(places_ptr + token * k + j)
        there = (place >= 0) & (place < count)
        x = tl.load(rows_ptr + place * stride + c, mask=c < tl.where(there, n, 0), other=0.0).to(tl.float32)
        if GATES:
            x = tl.where(
                there, x * tl.load(gates_ptr + token * k + j), 0.0
            )  # a choice without a row adds nothing, whatever its gate
        total += x
    tl.store(y_ptr + token * n + c, total.to(y_ptr.dtype.element_ty), mask=c < n)


@kernel
def _dots(x_ptr, rows_ptr, places_ptr, out_ptr, k, n, count, x_stride, stride, BLOCK: tl.constexpr):
    """One choice for each program."""
    choice = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + choice)
    end = tl.where((place >= 0) & (place < count), n, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (choice // k) * x_stride + c, mask=c < end, other=0.0).to(tl.float32)
        total += x * tl.load(rows_ptr + place * stride + c, mask=c < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + choice, tl.sum(total, 0))


def triton_order(experts: Tensor, count: int, block: int = CHOICES) -> Order:
    """As `reference_order`: counts of pieces, their running sums, then each piece puts its choices."""
    flat = experts.reshape(-1)
    n, width = flat.numel(), power_of_2(count + 1)
    if n == 0:
        return reference_order(experts, count)
    block = max(1, min(block, TILE // width, power_of_2(n)))
    programs = cdiv(n, block)
    counts = torch.empty(programs, count + 1, dtype=torch.int32, device=flat.device)
    slots, places = torch.empty_like(flat), torch.empty_like(flat)
    _count[(programs,)](flat, counts, n, count, EXPERTS=width, BLOCK=block)
    by_expert = counts.t().reshape(-1)
    starts = (by_expert.cumsum(0) - by_expert).view(count + 1, programs).t().contiguous()
    _place[(programs,)](flat, starts, slots, places, n, count, EXPERTS=width, BLOCK=block)
    return Order(slots, places.view(experts.shape), counts.sum(0)[:count])


def triton(x: Tensor, slots: Tensor, places: Tensor, gates: Tensor | None, block: int = BLOCK) -> Tensor:
    """As `reference`."""
    if x.dtype == torch.float64:
        return reference(x, slots, places, gates)
    n = x.shape[1]
    y = x.new_empty(len(slots), n)
    if y.numel():
        block = min(block, power_of_2(n))
        grid = (len(slots), cdiv(n, block))
        tensors = (x, slots, places, y if gates is None else gates, y)
        _gather[grid](*tensors, places.shape[1], n, x.stride(0), GATES=gates is not None, BLOCK=block)
    return y


def triton_back(rows: Tensor, places: Tensor, gates: Tensor | None, block: int = BLOCK) -> Tensor:
    """As `reference_back`."""
    if rows.dtype == torch.float64:
        return reference_back(rows, places, gates)
    (tokens, k), n = places.shape, rows.shape[1]
    y = rows.new_empty(tokens, n)
    if y.numel():
        block = min(block, power_of_2(n))
        _combine[(tokens, cdiv(n, block))](
            rows, places, y if gates is None else gates, y, k, n, len(rows), rows.stride(0), GATES=gates is not None, BLOCK=block
        )
    return y


def triton_dots(x: Tensor, rows: Tensor, places: Tensor, block: int = BLOCK) -> Tensor:
    """As `reference_dots`."""
    if x.dtype == torch.float64:
        return reference_dots(x, rows, places)
    out, n = torch.empty(places.shape, dtype=torch.float32, device=x.device), x.shape[1]
    if out.numel():
        block = min(block, power_of_2(max(1, n)))
        _dots[(places.numel(),)](x, rows, places, out, places.shape[1], n, len(rows), x.stride(0), rows.stride(0), BLOCK=block)
    return out


# ---- CPU


def cpu_order(experts: Tensor, count: int) -> Order:
    """As `reference_order`."""
    library = native.load("moe")
    if library is None:
        return reference_order(experts, count)
    flat = experts.reshape(-1)
    order = Order(torch.empty_like(flat), torch.empty(experts.shape, dtype=torch.int64), torch.empty(count, dtype=torch.int64))
    library.expert_order(*map(native.pointer, (flat, *order)), native.integer(flat.numel()), native.integer(count))
    return order


def cpu(x: Tensor, slots: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    """As `reference`."""
    library = native.load("moe") if _fits(x, gates) else None
    if library is None:
        return reference(x, slots, places, gates)
    y, p = x.new_empty(len(slots), x.shape[1]), native.pointer
    sizes = map(native.integer, (*y.shape, places.shape[1], x.stride(0)))
    library.gather_rows(p(x), p(slots), p(places), p(gates), p(y), *sizes, native.DTYPES[x.dtype], native.threads())
    return y


def cpu_back(rows: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    """As `reference_back`."""
    library = native.load("moe") if _fits(rows, gates) else None
    if library is None:
        return reference_back(rows, places, gates)
    y, p = rows.new_empty(places.shape[0], rows.shape[1]), native.pointer
    sizes = map(native.integer, (*places.shape, rows.shape[1], len(rows), rows.stride(0)))
    library.combine_rows(p(rows), p(places), p(gates), p(y), *sizes, native.DTYPES[rows.dtype], native.threads())
    return y


def cpu_dots(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """As `reference_dots`."""
    library = native.load("moe") if x.dtype == rows.dtype and x.dtype in native.DTYPES else None
    if library is None:
        return reference_dots(x, rows, places)
    out, p = torch.empty(places.shape), native.pointer
    sizes = map(native.integer, (*places.shape, x.shape[1], len(rows), x.stride(0), rows.stride(0)))
    library.row_dots(p(x), p(rows), p(places), p(out), *sizes, native.DTYPES[x.dtype], native.threads())
    return out


def _fits(rows: Tensor, gates: Tensor | None) -> bool:
    """Are the formats those of the C++ path?"""
    return rows.dtype in native.DTYPES and (gates is None or gates.dtype == torch.float32)


# ---- one operation each

EXPERT_ORDER = Operation("expert_order", reference_order, triton_order, cpu_order)
PERMUTE = Operation("permute", reference, triton, cpu)
UNPERMUTE = Operation("unpermute", reference_back, triton_back, cpu_back)
ROW_DOTS = Operation("row_dots", reference_dots, triton_dots, cpu_dots)

_ORDERED = "Tensor slots, Tensor places, Tensor? gates"


@torch.library.custom_op(
    "partita::expert_order", mutates_args=(), schema="(Tensor experts, int count) -> (Tensor, Tensor, Tensor)"
)
def _expert_order(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    slots, places, sizes = EXPERT_ORDER.on(experts.device)(experts.contiguous(), count)
    return slots, places, sizes


@torch.library.custom_op("partita::permute", mutates_args=(), schema=f"(Tensor x, {_ORDERED}) -> Tensor")
def _permute(x: Tensor, slots: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    return PERMUTE.on(x.device)(as_rows(x), slots, places, None if gates is None else gates.contiguous())


@torch.library.custom_op("partita::unpermute", mutates_args=(), schema=f"(Tensor rows, {_ORDERED}) -> Tensor")
def _unpermute(rows: Tensor, slots: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    return UNPERMUTE.on(rows.device)(as_rows(rows), places, None if gates is None else gates.contiguous())


@torch.library.custom_op("partita::row_dots", mutates_args=(), schema="(Tensor x, Tensor rows, Tensor places) -> Tensor")
def _row_dots(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return ROW_DOTS.on(x.device)(as_rows(x), as_rows(rows), places)


@_expert_order.register_fake
def _expert_order_fake(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    return experts.new_empty(experts.numel()), experts.new_empty(experts.shape), experts.new_empty(count)


@_permute.register_fake
def _permute_fake(x: Tensor, slots: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    return x.new_empty(slots.shape[0], x.shape[1])


@_unpermute.register_fake
def _unpermute_fake(rows: Tensor, slots: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


@_row_dots.register_fake
def _row_dots_fake(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(places.shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, slots, places, gates = inputs
    ctx.gated = gates is not None
    ctx.save_for_backward(slots, places, *((x, gates) if ctx.gated else ()))


def _differentiate_permute(ctx, drows):  # type: ignore[no-untyped-def]
    slots, places, *gated = ctx.saved_tensors
    ops, wanted = torch.ops.partita, ctx.needs_input_grad
    dx = ops.unpermute(drows, slots, places, gated[1] if ctx.gated else None) if wanted[0] else None
    dgates = ops.row_dots(gated[0], drows, places).to(gated[1].dtype) if ctx.gated and wanted[3] else None
    return dx, None, None, dgates


def _differentiate_unpermute(ctx, dy):  # type: ignore[no-untyped-def]
    slots, places, *gated = ctx.saved_tensors
    ops, wanted = torch.ops.partita, ctx.needs_input_grad
    drows = ops.permute(dy, slots, places, gated[1] if ctx.gated else None) if wanted[0] else None
    dgates = ops.row_dots(dy, gated[0], places).to(gated[1].dtype) if ctx.gated and wanted[3] else None
    return drows, None, None, dgates


_permute.register_autograd(_differentiate_permute, setup_context=_save)
_unpermute.register_autograd(_differentiate_unpermute, setup_context=_save)
