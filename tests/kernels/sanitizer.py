"""Memory checks for Triton's interpreter: accesses outside of the tensors given to a kernel, and two programs storing to one address.

The interpreter itself reads and writes any address silently, and runs programs one after another, so races never show. It also ignores int32
overflow unless told not to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class ViolationError(AssertionError):
    """A kernel did what a GPU would punish, or not notice."""


class _State:
    """Of the launch that is running: address ranges of its tensors, and who stored where."""

    def __init__(self) -> None:
        self.begin, self.end = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        self.writer: dict[int, tuple[int, ...]] = {}
        self.program: tuple[int, ...] = ()

    def launch(self, tensors: list[torch.Tensor]) -> None:
        spans = sorted({span for t in tensors for span in (_span(t), *getattr(t, "spans", ()))})
        self.begin, self.end = (np.array([s[i] for s in spans], np.uint64) for i in (0, 1))
        self.writer.clear()

    def check(self, pointers: Any, mask: Any, what: str) -> np.ndarray:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        addresses = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]
        if not addresses.size:
            return addresses
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        # Tensors may be views of one buffer: an address is right if any range holds it.
        good = ((addresses[:, None] >= self.begin) & (addresses[:, None] + size <= self.end)).any(1)
        if not good.all():
            raise ViolationError(
                f"{what} outside of all tensors: {int((~good).sum())} of {addresses.size}, program {self.program}"
            )
        return addresses

    def store(self, addresses: np.ndarray) -> None:
        for address in addresses.ravel().tolist():
            if self.writer.setdefault(address, self.program) != self.program:
                raise ViolationError(f"race: programs {self.writer[address]} and {self.program} store to one address")


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor and the one after its last."""
    if t.numel() == 0:
        return t.data_ptr(), t.data_ptr()
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


@contextmanager
def sanitize() -> Iterator[None]:
    """Inside, kernels raise ViolationError (or the interpreter's own error around it)."""
    builder, executor, state = interpreter.InterpreterBuilder, interpreter.GridExecutor, _State()
    saved = (builder.create_masked_load, builder.create_masked_store, executor._init_args_hst, builder.set_grid_idx)

    def load(self, pointers, mask, *rest, **more):
        state.check(pointers, mask, "load")
        return saved[0](self, pointers, mask, *rest, **more)

    def store(self, pointers, value, mask, *rest, **more):
        state.store(state.check(pointers, mask, "store"))
        return saved[1](self, pointers, value, mask, *rest, **more)

    def arguments(self, args, kwargs):
        given = list(_tensors([*args, *kwargs.values()]))  # with the spans of tables, which copies don't have
        args, kwargs = saved[2](self, args, kwargs)
        state.launch([*given, *_tensors([*args, *kwargs.values()])])
        return args, kwargs

    def place(self, x, y, z):
        state.program = (x, y, z)
        return saved[3](self, x, y, z)

    options = interpreter.interpreter_builder.options
    debug = options.debug
    try:
        builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx = load, store, place
        executor._init_args_hst = arguments
        object.__setattr__(options, "debug", True)  # int32 overflow and device_assert
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store, executor._init_args_hst, builder.set_grid_idx = saved
        object.__setattr__(options, "debug", debug)
