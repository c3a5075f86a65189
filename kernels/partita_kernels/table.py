"""Several ranges in one Triton launch: a table of addresses on the device, and which program works on which range.

A row of the table: elements, first program, number of the first element, then addresses. Rows depend on addresses and sizes only, so tables of
buffers that stay are made once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from partita_kernels.jit import cdiv, kernel

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

HEAD = 3  # columns before the addresses
ALIGNMENT = 16  # bytes: the longest load of a thread


class Table:
    """rows: int64 [ranges, HEAD + addresses]. owners: int32 [programs], the range of each program. aligned: all addresses?"""

    def __init__(self, rows: Tensor, owners: Tensor, aligned: bool) -> None:
        self.rows, self.owners, self.aligned = rows, owners, aligned

    @property
    def programs(self) -> int:
        """Of the launch."""
        return self.owners.numel()


def make_table(groups: Sequence[Sequence[Tensor | None]], block: int, starts: Sequence[int] | None = None) -> Table:
    """groups: for each range the tensors that belong together, the first as long as the range; None: address 0.

    block: elements of a program. All on one device.
    """
    rows = [(ranges[0].numel(), *(0 if t is None else t.data_ptr() for t in ranges)) for ranges in groups]  # type: ignore[union-attr]
    firsts = tuple(starts) if starts is not None else (0,) * len(rows)
    table = _cached(tuple(rows), firsts, block, str(groups[0][0].device))  # type: ignore[union-attr]
    # For memory checks: which addresses are right.
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for g in groups for t in g if t is not None]
    table.rows.spans = spans  # type: ignore[attr-defined]
    return table


@functools.lru_cache(maxsize=64)
def _cached(rows: tuple[tuple[int, ...], ...], starts: tuple[int, ...], block: int, device: str) -> Table:
    counts = [cdiv(row[0], block) for row in rows]
    first, lines = 0, []
    for row, start, count in zip(rows, starts, counts, strict=True):
        lines.append([row[0], first, start, *row[1:]])
        first += count
    owners = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
    aligned = all(address % ALIGNMENT == 0 for row in rows for address in row[1:])
    return Table(to_device(torch.tensor(lines), device), to_device(owners, device), aligned)


def to_device(values: Tensor, device: Any) -> Tensor:
    """A small tensor of the host's on a device; nobody waits."""
    return values.to(device, non_blocking=True)


@kernel
def range_of(rows_ptr, owners_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(row of the table, number of the range, first element of this program, elements of the range)."""
    program = tl.program_id(0)
    owner = tl.load(owners_ptr + program).to(tl.int64)
    row = rows_ptr + owner * WIDTH
    first = (program - tl.load(row + 1)) * BLOCK
    return row, owner, first.to(tl.int64), tl.load(row)


@kernel
def address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in an address column."""
    pointer = tl.load(row + 3 + COLUMN).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer
