"""What the optimizer updates share: checking lists of flat ranges and sorting them by number format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from partita_kernels import native

CHUNK = 1 << 16  # elements at a time in the plain torch paths: temporaries stay in the cache

Tensors = Sequence[torch.Tensor]
Copies = Sequence[torch.Tensor | None]


@dataclass
class Batch:
    """Ranges with the same formats. states: a list for each optimizer state."""

    grad_dtype: torch.dtype
    copy_dtype: torch.dtype | None
    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    states: list[list[torch.Tensor]] = field(default_factory=list)
    copies: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        """Float32 throughout: torch's own fused updates take it in one pass."""
        return self.copy_dtype is None and all(t.dtype == torch.float32 for t in self.tensors())

    @property
    def native(self) -> bool:
        """Can the C++ updates take it?"""
        formats = self.grad_dtype in native.DTYPES and (self.copy_dtype is None or self.copy_dtype in native.DTYPES)
        return formats and all(p.dtype == torch.float32 for p in self.params) and all(t.is_contiguous() for t in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of them."""
        for group in (self.params, self.grads, *self.states):
            yield from group
        yield from (c for c in self.copies if c is not None)

    def codes(self) -> tuple[int, int]:
        """Dtype codes of gradients and copies for the C++ updates."""
        copy = native.NO_DTYPE if self.copy_dtype is None else native.DTYPES[self.copy_dtype]
        return native.DTYPES[self.grad_dtype], copy


def batches(params: Tensors, grads: Tensors, states: Sequence[Tensors], copies: Copies) -> list[Batch]:
    """The ranges that aren't empty, by format. Raises ValueError where lists or ranges differ in length or aren't flat."""
    if any(len(group) != len(params) for group in (grads, copies, *states)):
        raise ValueError(
            f"{len(params)} parameter ranges with {[len(g) for g in (grads, *states, copies)]} gradients, states, copies"
        )
    found: dict[tuple[torch.dtype, torch.dtype | None], Batch] = {}
    for i, (param, grad, copy) in enumerate(zip(params, grads, copies, strict=True)):
        own = [group[i] for group in states]
        _check(i, param, [grad, *own] if copy is None else [grad, *own, copy])
        if param.numel() == 0:
            continue
        key = (grad.dtype, None if copy is None else copy.dtype)
        batch = found.setdefault(key, Batch(*key, states=[[] for _ in states]))
        batch.params.append(param)
        batch.grads.append(grad)
        batch.copies.append(copy)
        for held, state in zip(batch.states, own, strict=True):
            held.append(state)
    return list(found.values())


def _check(index: int, param: torch.Tensor, others: list[torch.Tensor]) -> None:
    if param.dim() != 1 or any(t.shape != param.shape for t in others):
        raise ValueError(
            f"range {index}: parameter {tuple(param.shape)} with {[tuple(t.shape) for t in others]}; all must be 1-D and alike"
        )


def is_set(flag: torch.Tensor | None) -> bool:
    """Is the 0-d flag nonzero? Waits for the device."""
    return flag is not None and bool(flag)


def chunks(*groups: Sequence[torch.Tensor | None]) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Pieces of at most CHUNK elements of tensors that belong together (first of each group, second of each, ...)."""
    for together in zip(*groups, strict=True):
        size = next(t.numel() for t in together if t is not None)
        for start in range(0, size, CHUNK):
            yield tuple(None if t is None else t[start : start + CHUNK] for t in together)
