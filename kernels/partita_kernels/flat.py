"""What the optimizer updates share: checking lists of flat ranges and sorting them by number format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from partita_kernels import native
from partita_kernels.rounding import BLOCK8

Tensors = Sequence[torch.Tensor]
Copies = Sequence[torch.Tensor | None]
PerRange = float | Sequence[float]

STATES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8)


class State(NamedTuple):
    """One optimizer state of all ranges. scales: of 8-bit codes. signed: may it be negative?"""

    values: Tensors
    scales: Copies
    signed: bool = True


class Formats(NamedTuple):
    """Number formats of ranges that one call of a kernel takes."""

    param: torch.dtype
    grad: torch.dtype
    copy: torch.dtype | None
    states: tuple[torch.dtype, ...]


@dataclass
class Batch:
    """Ranges with the same formats. states, scales: a list for each optimizer state. numbers: of each range."""

    formats: Formats
    signed: tuple[bool, ...]
    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    copies: list[torch.Tensor | None] = field(default_factory=list)
    states: list[list[torch.Tensor]] = field(default_factory=list)
    scales: list[list[torch.Tensor | None]] = field(default_factory=list)
    numbers: list[tuple[float, ...]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        """Float32 throughout: torch's own fused updates take it in one pass."""
        f = self.formats
        return f.copy is None and {f.param, f.grad, *f.states} == {torch.float32}

    @property
    def native(self) -> bool:
        """Can the C++ updates take it?"""
        f = self.formats
        states = all(dtype in (torch.float32, torch.bfloat16, torch.uint8) for dtype in f.states)
        return (
            states and f.param in (torch.float32, torch.bfloat16) and f.grad in native.DTYPES and f.copy in (None, *native.DTYPES)
        )


def spread(value: PerRange, count: int, name: str) -> list[float]:
    """One number for each of `count` ranges. Raises ValueError for a list of another length."""
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(f"{name}: {len(value)} numbers for {count} ranges; give one, or one for each range")
    return [float(v) for v in value]


def batches(
    params: Tensors,
    grads: Tensors,
    states: Sequence[State],
    copies: Copies,
    numbers: Sequence[tuple[float, ...]],
    starts: Sequence[int] | None = None,
) -> list[Batch]:
    """The ranges that aren't empty, by format. Raises ValueError where lists or ranges differ in length or aren't flat.

    numbers: of each range, for the kernels. starts: see `rounding.Rounding`.
    """
    starts = [0] * len(params) if starts is None else starts
    lists = [grads, copies, starts, *(part for s in states for part in (s.values, s.scales))]
    if any(len(group) != len(params) for group in lists):
        raise ValueError(
            f"{len(params)} parameter ranges with lists of {[len(g) for g in lists]} gradients, copies, starts, states"
        )
    found: dict[Formats, Batch] = {}
    for i, param in enumerate(params):
        own, scales = [s.values[i] for s in states], [s.scales[i] for s in states]
        _check(i, param, [t for t in (grads[i], *own, copies[i]) if t is not None])
        if param.numel() == 0:
            continue
        _check_states(i, own, scales, starts[i])
        copy = copies[i]
        formats = Formats(param.dtype, grads[i].dtype, None if copy is None else copy.dtype, tuple(t.dtype for t in own))
        if formats not in found:
            empty: list[list] = [[] for _ in states]
            found[formats] = Batch(formats, tuple(s.signed for s in states), states=empty, scales=[[] for _ in states])
        batch = found[formats]
        batch.params.append(param)
        batch.grads.append(grads[i])
        batch.copies.append(copy)
        batch.numbers.append(numbers[i])
        batch.starts.append(starts[i])
        for k in range(len(states)):
            batch.states[k].append(own[k])
            batch.scales[k].append(scales[k])
    return list(found.values())


def _check(index: int, param: torch.Tensor, others: list[torch.Tensor]) -> None:
    if param.dim() != 1 or any(t.shape != param.shape for t in others):
        raise ValueError(
            f"range {index}: parameter {tuple(param.shape)} with {[tuple(t.shape) for t in others]}; all must be 1-D and alike"
        )
    if not all(t.is_contiguous() for t in (param, *others)):
        raise ValueError(f"range {index}: a tensor isn't contiguous; give a contiguous view of the flat buffer")


def _check_states(index: int, states: list[torch.Tensor], scales: list[torch.Tensor | None], start: int) -> None:
    for values, scale in zip(states, scales):
        if values.dtype not in STATES:
            raise ValueError(f"range {index}: a state in {values.dtype}; there are float32, bfloat16 and uint8 codes with scales")
        wanted = -(-values.numel() // BLOCK8) if values.dtype == torch.uint8 else None
        got = None if scale is None else scale.numel()
        if got != wanted:
            raise ValueError(f"range {index}: a state of {values.numel()} {values.dtype} with {got} scales, not {wanted}")
        if wanted is not None and start % BLOCK8:
            raise ValueError(f"range {index}: 8-bit states start at element {start}, which must be a multiple of {BLOCK8}")


def is_set(flag: torch.Tensor | None) -> bool:
    """Is the 0-d flag nonzero? Waits for the device."""
    return flag is not None and bool(flag)
