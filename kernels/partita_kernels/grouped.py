"""Products of rows that lie in groups with a matrix of each group (the layers of experts), and both gradients.

Row r of x [n, K] belongs to group g where sizes[0] + ... + sizes[g-1] <= r < sizes[0] + ... + sizes[g]: y[r] = x[r] @ weight[g]. Backward:
dx[r] = dy[r] @ weight[g].T, which is the same operation; dweight[g] = x_g.T @ dy_g. Groups may be empty; nothing is padded, and sizes
stay where they are, so that nobody waits for a device. Rows beyond the last group give zeros and count for no gradient.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from partita_kernels import native, tuning
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel, power_of_2
from partita_kernels.rows import as_rows, wide
from partita_kernels.tuning import Tile

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

TILE = (128, 128, 64)  # rows, columns and depth of a Triton program's step, in two bytes an element
CANDIDATES = [
    (128, 256, 64), (256, 128, 64), (128, 128, 32), (64, 128, 64), (64, 256, 64), (64, 64, 64), (32, 128, 64), (16, 128, 128),
]  # fmt: skip
STAGES = 3
ALIGNMENT = 16  # bytes, of what torch's grouped product reads
ONE_CALL = (torch.float32, torch.bfloat16)
FEW = 48  # rows of a group on average, up to which our C++ is faster on a CPU than torch, which copies matrices into the order it wants


def grouped_matmul(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """x [n, K], weight [G, K, N] of any strides, int64 sizes [G] on the device of x, together at most n -> [n, N] in the dtype of x.

    Sums are float32 (float64 for float64). Raises ValueError where shapes or dtypes don't fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or sizes.shape != weight.shape[:1]:
        raise ValueError(f"grouped_matmul: x {tuple(x.shape)}, weight {tuple(weight.shape)}, sizes {tuple(sizes.shape)}")
    if x.dtype != weight.dtype or sizes.dtype != torch.int64:
        raise ValueError(f"grouped_matmul: x is {x.dtype}, weight {weight.dtype} and sizes {sizes.dtype} (int64 is wanted)")
    return torch.ops.partita.grouped_matmul(x, weight, sizes)


# ---- plain torch and CPU


def spans(sizes: Tensor, rows: int) -> list[tuple[int, int]]:
    """First row and end of each group. Raises ValueError where they don't fit."""
    ends = sizes.cumsum(0).tolist()
    if ends and (ends[-1] > rows or int(sizes.min()) < 0):
        raise ValueError(f"grouped_matmul: groups have {ends[-1]} rows, there are {rows}")
    return list(zip([0, *ends], ends, strict=False))


def reference(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """As `grouped_matmul`."""
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for g, (begin, end) in enumerate(spans(sizes, x.shape[0])):
        y[begin:end] = (wide(x[begin:end]) @ wide(weight[g])).to(y.dtype)
    return y


def reference_outer(x: Tensor, dy: Tensor, sizes: Tensor, turned: bool) -> Tensor:
    """x [n, K], dy [n, N] -> [G, K, N]: x_g.T @ dy_g of each group. turned: laid out as [G, N, K]."""
    out = _outer_like(x, dy, len(sizes), turned)
    for g, (begin, end) in enumerate(spans(sizes, x.shape[0])):
        out[g] = (wide(x[begin:end]).t() @ wide(dy[begin:end])).to(out.dtype)
    return out


def cpu(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """As `reference`, into the rows where the result belongs; torch's products sum low precision in float32.

    One call where the tensors allow it: with few rows of each group, a call for each costs as much as the products.
    """
    by_column = weight.stride(1) == 1
    if (by_column or weight.stride(2) == 1) and (library := _few(x, weight, sizes)) is not None:
        y, p = x.new_empty(x.shape[0], weight.shape[2]), native.pointer
        steps = (x.stride(0), weight.stride(0), weight.stride(2 if by_column else 1))
        numbers = map(native.integer, (*x.shape, y.shape[1], len(sizes), *steps))
        if not library.grouped_product(p(x), p(weight), p(y), p(sizes), *numbers, by_column, native.threads()):
            spans(sizes, len(x))  # raises
        return y
    if _one_call(x, weight):
        y = F.grouped_mm(x, weight, offs=_ends(sizes, x))
        y[int(sizes.sum()) :].zero_()
        return y
    y, end = x.new_empty(x.shape[0], weight.shape[2]), 0
    for (begin, end), w in zip(spans(sizes, x.shape[0]), weight.unbind(), strict=True):
        if begin != end:
            torch.mm(x[begin:end], w, out=y[begin:end])
    y[end:].zero_()
    return y


def _few(x: Tensor, other: Tensor, sizes: Tensor) -> ctypes.CDLL | None:
    """Our C++ where it takes the tensors and groups are small; None elsewhere."""
    if x.dtype != torch.float32 or len(x) > FEW * len(sizes):
        return None
    library = native.load("grouped")
    lanes = library.grouped_lanes() if library is not None else 0
    return library if lanes and not (x.shape[1] % lanes or other.shape[-1] % lanes) else None


def _one_call(x: Tensor, other: Tensor) -> bool:
    """Whether torch's grouped product takes them: some rows, which begin at multiples of 16 bytes, and no float64."""
    aligned = all(n * x.element_size() % ALIGNMENT == 0 for n in (x.shape[1], other.shape[-1]))
    return aligned and len(x) > 0 and x.dtype in ONE_CALL and not (x.data_ptr() | other.data_ptr()) % ALIGNMENT


def _ends(sizes: Tensor, x: Tensor) -> Tensor:
    """Where groups end. Raises as `spans` does."""
    spans(sizes, x.shape[0])
    return sizes.cumsum(0, dtype=torch.int32)


def cpu_outer(x: Tensor, dy: Tensor, sizes: Tensor, turned: bool) -> Tensor:
    """As `reference_outer`."""
    if (library := _few(x, dy, sizes)) is not None:
        (one, other), p = (dy, x) if turned else (x, dy), native.pointer
        out = x.new_empty(len(sizes), one.shape[1], other.shape[1])
        numbers = map(native.integer, (len(x), *out.shape[1:], len(sizes), one.stride(0), other.stride(0)))
        if not library.grouped_outer(p(one), p(other), p(out), p(sizes), *numbers, native.threads()):
            spans(sizes, len(x))  # raises
        return out.transpose(1, 2) if turned else out
    if _one_call(x, dy):
        one, other = (dy, x) if turned else (x, dy)
        out = F.grouped_mm(one.t(), other, offs=_ends(sizes, x))
        return out.transpose(1, 2) if turned else out
    out = _outer_like(x, dy, len(sizes), turned)
    for (begin, end), w in zip(spans(sizes, x.shape[0]), out.unbind(), strict=True):
        if begin == end:
            w.zero_()
        elif turned:
            torch.mm(dy[begin:end].t(), x[begin:end], out=w.t())
        else:
            torch.mm(x[begin:end].t(), dy[begin:end], out=w)
    return out


def _outer_like(x: Tensor, dy: Tensor, groups: int, turned: bool) -> Tensor:
    """Unwritten [G, K, N]."""
    if turned:
        return x.new_empty(groups, dy.shape[1], x.shape[1]).transpose(1, 2)
    return x.new_empty(groups, x.shape[1], dy.shape[1])


# ---- Triton


@kernel
def _product(
    x_ptr, w_ptr, y_ptr, sizes_ptr, n, depth, width, groups, x_stride, w_group, w_row, w_col, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of y for each program. Which group a tile belongs to follows from the sizes; tiles beyond the last do nothing."""
    tile = tl.program_id(1)
    g = tl.arange(0, GROUPS)
    sizes = tl.load(sizes_ptr + g, mask=g < groups, other=0).to(tl.int32)
    sizes = tl.where(g == groups, n - tl.sum(sizes, 0), sizes)  # the rows beyond are a group without a matrix
    tiles = (sizes + ROWS - 1) // ROWS
    group = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if group <= groups:
        before = tl.sum(tl.where(g < group, tiles, 0), 0)
        first = tl.sum(tl.where(g < group, sizes, 0), 0)
        size = tl.sum(tl.where(g == group, sizes, 0), 0)
        row = (tile - before) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        at = (first + row).to(tl.int64)[:, None]
        live = (row < size)[:, None]
        k = tl.arange(0, DEPTH)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        x_at = x_ptr + at * x_stride + k[None, :]
        w_at = w_ptr + group.to(tl.int64) * w_group + k[:, None].to(tl.int64) * w_row + column[None, :].to(tl.int64) * w_col
        there = (column < tl.where(group < groups, width, 0))[None, :]
        for start in range(0, depth, DEPTH):
            x = tl.load(x_at, mask=live & (start + k < depth)[None, :], other=0.0)
            w = tl.load(w_at, mask=there & (start + k < depth)[:, None], other=0.0)
            total = tl.dot(x, w, total, input_precision=PRECISION)
            x_at += DEPTH
            w_at += DEPTH * w_row
        y_at = y_ptr + at * width + column[None, :]
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=live & (column < width)[None, :])


@kernel
def _outer(
    x_ptr, dy_ptr, dw_ptr, sizes_ptr, depth, width, groups, x_stride, dy_stride, dw_group, dw_row, dw_col, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, COLUMNS] of a group's gradient for each program, summed over DEPTH rows of the group at a time."""
    group = tl.program_id(2)
    g = tl.arange(0, GROUPS)
    sizes = tl.load(sizes_ptr + g, mask=g < groups, other=0).to(tl.int32)
    first = tl.sum(tl.where(g < group, sizes, 0), 0)
    size = tl.sum(tl.where(g == group, sizes, 0), 0)
    k = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, size, DEPTH):
        at = (first + start + r).to(tl.int64)
        live = start + r < size
        x = tl.load(x_ptr + at[None, :] * x_stride + k[:, None], mask=live[None, :] & (k < depth)[:, None], other=0.0)
        dy = tl.load(
            dy_ptr + at[:, None] * dy_stride + column[None, :], mask=live[:, None] & (column < width)[None, :], other=0.0
        )
        total = tl.dot(x, dy, total, input_precision=PRECISION)
    at = dw_ptr + group.to(tl.int64) * dw_group + k[:, None].to(tl.int64) * dw_row + column[None, :].to(tl.int64) * dw_col
    tl.store(at, total.to(dw_ptr.dtype.element_ty), mask=(k < depth)[:, None] & (column < width)[None, :])


def _tile(element: int, rows: int, columns: int, tile: Tile) -> dict[str, int]:
    """Tiles not much larger than what there is; at least 16, which matrix units take."""
    tile = tuple(n * 2 // element for n in tile)
    sizes = (min(tile[0], power_of_2(max(rows, 1))), min(tile[1], power_of_2(max(columns, 1))), tile[2])
    return {name: max(16, n) for name, n in zip(("ROWS", "COLUMNS", "DEPTH"), sizes, strict=True)}


def _precision(x: Tensor) -> str:
    """As torch multiplies float32 matrices."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _warps(tiles: dict[str, int]) -> int:
    """At most 64 sums of a tile for each thread, where there are that many threads."""
    return 8 if tiles["ROWS"] * tiles["COLUMNS"] > 64 * 128 else 4


def triton(x: Tensor, weight: Tensor, sizes: Tensor, tile: Tile = TILE) -> Tensor:
    """As `reference`."""
    if x.dtype == torch.float64:
        return reference(x, weight, sizes)
    (n, depth), (groups, _, width) = x.shape, weight.shape
    y = x.new_empty(n, width)

    def launch(tile: Tile) -> None:
        tiles = _tile(x.element_size(), cdiv(n, groups), width, tile)
        rows = cdiv(n, tiles["ROWS"]) + groups  # each group ends in at most one tile that isn't full
        _product[(cdiv(width, tiles["COLUMNS"]), rows)](
            x, weight, y, sizes, n, depth, width, groups, x.stride(0), *weight.stride(), GROUPS=power_of_2(groups + 1), **tiles,
            PRECISION=_precision(x), num_warps=_warps(tiles), num_stages=STAGES,
        )  # fmt: skip

    if y.numel():
        launch(tuning.tile("grouped_matmul", x, (cdiv(n, groups), depth, width), tile, CANDIDATES, launch))
    return y


def triton_outer(x: Tensor, dy: Tensor, sizes: Tensor, turned: bool, tile: Tile = TILE) -> Tensor:
    """As `reference_outer`."""
    if x.dtype == torch.float64:
        return reference_outer(x, dy, sizes, turned)
    groups, depth, width = len(sizes), x.shape[1], dy.shape[1]
    out = _outer_like(x, dy, groups, turned)

    def launch(tile: Tile) -> None:
        tiles = _tile(x.element_size(), depth, width, tile)
        grid = (cdiv(width, tiles["COLUMNS"]), cdiv(depth, tiles["ROWS"]), groups)
        _outer[grid](
            x, dy, out, sizes, depth, width, groups, x.stride(0), dy.stride(0), *out.stride(), GROUPS=power_of_2(groups), **tiles,
            PRECISION=_precision(x), num_warps=_warps(tiles), num_stages=STAGES,
        )  # fmt: skip

    if out.numel():
        launch(tuning.tile("grouped_outer", x, (cdiv(len(x), groups), depth, width), tile, CANDIDATES, launch))
    return out


# ---- one operation

GROUPED = Operation("grouped_matmul", reference, triton, cpu)
GROUPED_OUTER = Operation("grouped_outer", reference_outer, triton_outer, cpu_outer)


@torch.library.custom_op("partita::grouped_matmul", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor sizes) -> Tensor")
def _grouped(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return GROUPED.on(x.device)(as_rows(x), weight, sizes.contiguous())


@torch.library.custom_op(
    "partita::grouped_outer", mutates_args=(), schema="(Tensor x, Tensor dy, Tensor sizes, bool turned) -> Tensor"
)
def _grouped_outer(x: Tensor, dy: Tensor, sizes: Tensor, turned: bool) -> Tensor:
    return GROUPED_OUTER.on(x.device)(as_rows(x), as_rows(dy), sizes.contiguous(), turned)


@_grouped.register_fake
def _grouped_fake(x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_grouped_outer.register_fake
def _grouped_outer_fake(x: Tensor, dy: Tensor, sizes: Tensor, turned: bool) -> Tensor:
    return _outer_like(x, dy, sizes.shape[0], turned)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    x, weight, sizes = ctx.saved_tensors
    ops, wanted = torch.ops.partita, ctx.needs_input_grad
    dx = ops.grouped_matmul(dy, weight.transpose(1, 2), sizes) if wanted[0] else None
    # Laid out as the weight is, so that the gradient needs no copy.
    turned = weight.stride(2) > weight.stride(1)
    return dx, ops.grouped_outer(x, dy, sizes, turned) if wanted[1] else None, None


_grouped.register_autograd(_differentiate, setup_context=_save)
