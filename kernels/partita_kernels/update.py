"""Optimizer updates over flat ranges in one pass: what is the same for every rule.

A rule gives its formula three times: on plain tensors, in Triton's language and in C++ (native/optimizer.cpp, by its number). Reading and
writing number formats, ranges with numbers of their own, stochastic rounding and 8-bit states are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from partita_kernels import native
from partita_kernels.flat import Batch, is_set
from partita_kernels.jit import kernel, language_type
from partita_kernels.rounding import (
    BLOCK8,
    Rounding,
    decode8,
    decode8_lanes,
    encode8,
    encode8_lanes,
    random_bits,
    random_lanes,
    stochastic_bfloat16,
    stochastic_lanes,
)
from partita_kernels.table import HEAD, address, make_table, range_of, to_device

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

CHUNK = 1 << 16  # elements at a time in plain torch: temporaries stay in the cache
BLOCK = 1024  # elements of a Triton program
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, None: 3}  # of formats in C++; 8-bit states follow
SIGNED8, UNSIGNED8 = 4, 5


@dataclass(frozen=True)
class Rule:
    """One optimizer. Each formula gets weights, scaled gradients, states, the range's numbers and a flag.

    piece: changes wide tensors in place. step: a Triton function that returns new weights and states. code: in C++.
    fused: torch's own update of float32 ranges with the same numbers, (batch, scale) -> None.
    """

    code: int
    piece: Callable[[Tensor, Tensor, list[Tensor], tuple[float, ...], int], None]
    step: Any
    fused: Callable[[Batch, Tensor, int], None] | None = None

    def reference(self, work: list[Batch], scale: Tensor, skip: Tensor | None, flag: int, rounding: Rounding | None) -> None:
        """Plain torch, piece by piece; computes in float32, or float64 for such parameters."""
        if is_set(skip):
            return
        for batch in work:
            for i, at in _pieces(batch):
                self._piece(batch, i, at, scale, flag, rounding)

    def _piece(self, batch: Batch, i: int, at: slice, scale: Tensor, flag: int, rounding: Rounding | None) -> None:
        stored, copy = batch.params[i][at], batch.copies[i]
        p = stored if stored.dtype == torch.float64 else stored.float()
        g = batch.grads[i][at].to(p.dtype) * scale.to(p)
        states = [_read(batch, k, i, at, p.dtype) for k in range(len(batch.states))]
        self.piece(p, g, states, batch.numbers[i], flag)
        noise = None if rounding is None else (batch.starts[i] + at.start, p.numel(), rounding.keys())
        if p.data_ptr() != stored.data_ptr():
            stored.copy_(p if noise is None else stochastic_bfloat16(p, random_bits(*noise, 0, p.device)))
        for k, state in enumerate(states):
            _write(batch, k, i, at, state, None if noise is None else random_bits(*noise, k + 1, p.device))
        if copy is not None:
            copy[at].copy_(p)

    def triton(
        self, work: list[Batch], scale: Tensor, skip: Tensor | None, flag: int, rounding: Rounding | None, block: int = BLOCK
    ) -> None:
        """One launch for all ranges of a format; nothing waits for the device."""
        device = work[0].params[0].device
        scale = scale.to(device, torch.float32)
        skip = None if skip is None else skip.to(device, torch.float32)
        for batch in work:
            if batch.formats.param == torch.float64:
                self.reference([batch], scale, skip, flag, rounding)
            else:
                _launch(self.step, batch, scale, skip, flag, rounding, block)

    def cpu(self, work: list[Batch], scale: Tensor, skip: Tensor | None, flag: int, rounding: Rounding | None) -> None:
        """torch's fused update for float32 without copies and unscaled; one C++ pass where torch would need several."""
        if is_set(skip):
            return
        factor = float(scale)
        for batch in work:
            one_pass = batch.plain and factor == 1.0 and self.fused is not None
            if batch.native and not one_pass and (library := native.load("optimizer")):
                _native(library, self.code, batch, factor, flag, rounding)
            elif batch.plain and self.fused is not None:
                self.fused(batch, scale, flag)
            else:
                self.reference([batch], scale, None, flag, rounding)


def _pieces(batch: Batch) -> Iterator[tuple[int, slice]]:
    for i, p in enumerate(batch.params):
        for start in range(0, p.numel(), CHUNK):
            yield i, slice(start, min(start + CHUNK, p.numel()))


def give_back(grads: list[torch.Tensor], factor: float) -> None:
    """Undo the product with `factor` that torch's fused updates leave in the gradients: callers may look at them after an update."""
    if factor not in (0.0, 1.0):
        torch._foreach_mul_(grads, 1.0 / factor)


def by_numbers(batch: Batch) -> Iterator[tuple[Any, ...]]:
    """(numbers, parameters, gradients, *states) of the ranges with the same numbers."""
    found: dict[tuple[float, ...], list[int]] = {}
    for i, numbers in enumerate(batch.numbers):
        found.setdefault(numbers, []).append(i)
    for numbers, chosen in found.items():
        yield numbers, *[[group[i] for i in chosen] for group in (batch.params, batch.grads, *batch.states)]


def _blocks(at: slice) -> slice:
    return slice(at.start // BLOCK8, -(-at.stop // BLOCK8))


def _read(batch: Batch, k: int, i: int, at: slice, dtype: torch.dtype) -> Tensor:
    values, scales = batch.states[k][i][at], batch.scales[k][i]
    if scales is not None:
        return decode8(values, scales[_blocks(at)], batch.signed[k]).to(dtype)
    return values if values.dtype == dtype else values.to(dtype)


def _write(batch: Batch, k: int, i: int, at: slice, state: Tensor, bits: Tensor | None) -> None:
    values, scales = batch.states[k][i][at], batch.scales[k][i]
    if scales is not None:
        encode8(state.float(), values, scales[_blocks(at)], batch.signed[k], bits)
    elif values.data_ptr() != state.data_ptr():
        values.copy_(state if bits is None or values.dtype != torch.bfloat16 else stochastic_bfloat16(state, bits))


# ---- C++


def _native(library: Any, code: int, batch: Batch, scale: float, flag: int, rounding: Rounding | None) -> None:
    p, f = native.pointers, batch.formats
    states = [
        (SIGNED8 if signed else UNSIGNED8) if dtype == torch.uint8 else CODES[dtype]
        for dtype, signed in zip(f.states, batch.signed)
    ]
    keys = (0, 0) if rounding is None else rounding.keys()
    numbers = [x for row in batch.numbers for x in row]
    library.update(
        code, native.integer(len(batch.params)), native.lengths(batch.params), native.integers(batch.starts),
        p(batch.params), CODES[f.param], p(batch.grads), CODES[f.grad], p(batch.copies), CODES[f.copy],
        p([t for s in batch.states for t in s]), p([t for s in batch.scales for t in s]), native.integers(states), native.integer(len(states)),
        native.doubles(numbers), native.integer(len(batch.numbers[0])), native.single(scale), flag,
        native.word(keys[0]), native.word(keys[1]), int(rounding is not None), native.threads(),
    )  # fmt: skip


# ---- Triton


@kernel
def _read_state(row, at, inside, COLUMN: tl.constexpr, FORMAT: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr):
    """Column COLUMN has the values, the next one the scales."""
    x = tl.load(address(row, COLUMN, FORMAT, ALIGNED) + at, mask=inside, other=0)
    if FORMAT == tl.uint8:  # noqa: SIM300
        scales = tl.load(address(row, COLUMN + 1, tl.float32, False) + at // 256, mask=inside, other=0.0)
        return decode8_lanes(x, scales, SIGNED)
    else:
        return x.to(tl.float32)


@kernel
def _write_state(
    row, at, inside, left, first, x, bits,
    COLUMN: tl.constexpr, FORMAT: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    where = address(row, COLUMN, FORMAT, ALIGNED) + at
    if FORMAT == tl.uint8:  # noqa: SIM300
        code, scale = encode8_lanes(x, bits, inside, SIGNED, STOCHASTIC, BLOCK, 256)
        tl.store(where, code, mask=inside)
        block = tl.arange(0, BLOCK // 256)
        tl.store(address(row, COLUMN + 1, tl.float32, False) + first // 256 + block, scale, mask=block * 256 < left)
    else:
        if STOCHASTIC and FORMAT == tl.bfloat16:  # noqa: SIM300
            x = stochastic_lanes(x, bits)
        tl.store(where, x.to(FORMAT), mask=inside)


@kernel
def _random(keys_ptr, number, STREAM: tl.constexpr):
    return random_lanes(number, tl.load(keys_ptr).to(tl.uint32), tl.load(keys_ptr + 1).to(tl.uint32), STREAM)


@kernel
def _block(
    row, first, left, numbers, scale_ptr, keys_ptr,
    STEP: tl.constexpr, FLAG: tl.constexpr, P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    SIGNED_B: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """left: elements from `first` to the end of the range."""
    lane = tl.arange(0, BLOCK)
    inside = lane < left
    at = first + lane
    p_at = address(row, 0, P, ALIGNED) + at
    p = tl.load(p_at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(address(row, 1, G, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    a = p * 0.0
    b = p * 0.0
    if A is not None:
        a = _read_state(row, at, inside, 3, A, True, ALIGNED)
    if B is not None:
        b = _read_state(row, at, inside, 5, B, SIGNED_B, ALIGNED)
    p, a, b = STEP(p, g, a, b, numbers, FLAG)
    number = tl.load(row + 2) + at
    if A is not None:
        bits = _random(keys_ptr, number, 1) if STOCHASTIC else 0
        _write_state(row, at, inside, left, first, a, bits, 3, A, True, ALIGNED, STOCHASTIC, BLOCK)
    if B is not None:
        bits = _random(keys_ptr, number, 2) if STOCHASTIC else 0
        _write_state(row, at, inside, left, first, b, bits, 5, B, SIGNED_B, ALIGNED, STOCHASTIC, BLOCK)
    if C is not None:
        tl.store(address(row, 2, C, ALIGNED) + at, p.to(C), mask=inside)
    if STOCHASTIC and P == tl.bfloat16:  # noqa: SIM300
        p = stochastic_lanes(p, _random(keys_ptr, number, 0))
    tl.store(p_at, p.to(P), mask=inside)


@kernel
def _kernel(
    rows_ptr, owners_ptr, numbers_ptr, scale_ptr, skip_ptr, keys_ptr,
    STEP: tl.constexpr, FLAG: tl.constexpr, NUMBERS: tl.constexpr, WIDTH: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, SIGNED_B: tl.constexpr,
    SKIP: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one range for each program. A, B: formats of the states, None where the rule has no such state."""
    row, owner, first, n = range_of(rows_ptr, owners_ptr, WIDTH, BLOCK)
    numbers = numbers_ptr + owner * NUMBERS
    if SKIP:
        n = tl.where(tl.load(skip_ptr) == 0, n, 0)
    if n - first >= BLOCK:  # whole blocks apart: without masks a thread reads 16 bytes at a time
        _block(
            row, first, BLOCK, numbers, scale_ptr, keys_ptr, STEP, FLAG, P, G, C, A, B, SIGNED_B, STOCHASTIC, ALIGNED, BLOCK
        )  # fmt: skip
    else:
        _block(
            row, first, n - first, numbers, scale_ptr, keys_ptr, STEP, FLAG, P, G, C, A, B, SIGNED_B, STOCHASTIC, ALIGNED, BLOCK
        )


def _launch(
    step: Any, batch: Batch, scale: Tensor, skip: Tensor | None, flag: int, rounding: Rounding | None, block: int
) -> None:
    f, device = batch.formats, scale.device
    columns: list[list[Tensor | None]] = [list(batch.params), list(batch.grads), batch.copies]
    for values, scales in zip(batch.states, batch.scales):
        columns += [list(values), scales]
    table = make_table(list(zip(*columns, strict=True)), block, batch.starts)
    numbers = to_device(torch.tensor(batch.numbers, dtype=torch.float32), device)
    keys = numbers if rounding is None else to_device(torch.tensor(rounding.keys()), device)
    types = [None if dtype is None else language_type(dtype) for dtype in (f.param, f.grad, f.copy, *f.states, None, None)]
    _kernel[(table.programs,)](
        table.rows, table.owners, numbers, scale, scale if skip is None else skip, keys, STEP=step.jitted(), FLAG=flag,
        NUMBERS=numbers.shape[1], WIDTH=HEAD + len(columns), SIGNED_B=len(batch.signed) < 2 or batch.signed[1],
        SKIP=skip is not None, STOCHASTIC=rounding is not None, ALIGNED=table.aligned, BLOCK=block, **dict(zip("PGCAB", types)),
    )  # fmt: skip
