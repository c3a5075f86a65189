"""Squared L2 norm of flat buffers: one read of each. A non-finite element makes it non-finite, so it is the finite check too."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double
from typing import TYPE_CHECKING

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel

if TYPE_CHECKING:
    import triton.language as tl

CHUNK = 1 << 16  # elements at a time in plain torch: what is widened stays in the cache
ROW = 256  # elements that are summed in one format; a divisor of CHUNK
WIDE = (torch.float32, torch.float64)
WORTH_COMPILING = 1 << 20  # float32 elements from which the C++ path is worth its compilation
BLOCK = 4096  # elements at a time of a Triton program
PROGRAMS = 1024  # Triton programs of a buffer at most


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements, 0-d float64 (float32 on devices without float64) on the device of the tensors.

    tensors: any shapes and float formats, all on one device; none at all: 0 on the CPU. The relative error is below 1e-6. Finite
    elements whose square float32 can't hold (beyond 1.8e19) may count as non-finite.
    """
    live = [t.detach().reshape(-1) for t in tensors if t.numel()]
    if live:
        return SQUARED_NORM.on(live[0].device)(live)
    return (
        torch.zeros((), dtype=_total_dtype(tensors[0]), device=tensors[0].device)
        if tensors
        else torch.zeros((), dtype=torch.float64)
    )


def _total_dtype(t: torch.Tensor) -> torch.dtype:
    return torch.float32 if t.device.type == "mps" else torch.float64


def reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Plain torch, row by row. Not torch.dot: its plain float32 sums are off by 1e-5 on equal elements."""
    parts = [part for t in tensors for part in _norms(t)]
    return torch.cat(parts).to(_total_dtype(tensors[0])).square().sum()


def _norms(t: torch.Tensor) -> list[torch.Tensor]:
    """Norms of rows so short that their float32 sums are exact enough: one pass over float32, chunks of other formats are widened."""
    whole = t.numel() // ROW * ROW
    chunks = [c for c in t[:whole].split(CHUNK) if c.numel()] if t.dtype not in WIDE else [t[:whole]] * (whole > 0)
    chunks = [c.view(-1, ROW) for c in chunks] + [t[whole:].view(1, -1)] * (whole < t.numel())
    return [torch.linalg.vector_norm(c if c.dtype in WIDE else c.float(), dim=1) for c in chunks]


def cpu(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """C++ summing in float64, format by format."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    return torch.stack([_cpu_same(dtype, group) for dtype, group in by_dtype.items()]).sum()


def _cpu_same(dtype: torch.dtype, tensors: list[torch.Tensor]) -> torch.Tensor:
    small = dtype == torch.float32 and sum(t.numel() for t in tensors) < WORTH_COMPILING
    library = None if small or dtype not in native.DTYPES else native.load("squares")
    if library is None:
        return reference(tensors)
    library.squared_norm.restype = c_double
    count = native.integer(len(tensors))
    value = library.squared_norm(count, native.lengths(tensors), native.pointers(tensors), native.DTYPES[dtype], native.threads())
    return torch.tensor(value, dtype=torch.float64)


def put_squared(into: torch.Tensor, value: torch.Tensor, *, add: bool) -> float | None:
    """Write `value` into `into`, or add it; returns the sum of squares of the result where that costs no pass of its own, else None.

    Both 1-D and of one length. It comes with float32 on the CPU, where C++ can be compiled, with an error below 1e-12; a non-finite
    element makes it non-finite.
    """
    fits = into.dtype == value.dtype == torch.float32 and into.is_cpu and value.is_cpu and value.is_contiguous()
    library = native.load("squares") if fits and SQUARED_NORM.on(into.device) is cpu else None
    if library is None:
        into.add_(value) if add else into.copy_(value)
        return None
    library.put_squared.restype = c_double
    n = native.integer(into.numel())
    return library.put_squared(native.pointer(into), native.pointer(value), n, int(add), native.threads())


@kernel
def _kernel(x_ptr, out_ptr, n, rounds, BLOCK: tl.constexpr):
    """out[program]: sum of squares of every programs-th block. Lanes are summed apart, so the error doesn't grow with n."""
    first = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(rounds):
        at = first + i * stride
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        total += x * x
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def triton(tensors: Sequence[torch.Tensor], block: int = BLOCK, programs: int = PROGRAMS) -> torch.Tensor:
    """Partial sums of all buffers into one tensor, then their sum in float64: the same bits each time."""
    grids = [min(cdiv(t.numel(), block), programs) for t in tensors]
    partial = torch.empty(sum(grids), dtype=torch.float32, device=tensors[0].device)
    start = 0
    for t, grid in zip(tensors, grids, strict=True):
        rounds = cdiv(cdiv(t.numel(), block), grid)
        _kernel[(grid,)](t, partial[start:], t.numel(), rounds, BLOCK=block)
        start += grid
    return partial.sum(dtype=torch.float64)


SQUARED_NORM = Operation("squared_norm", reference, triton, cpu)
