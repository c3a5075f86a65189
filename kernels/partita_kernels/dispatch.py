"""Which implementation of an operation runs: by device, by what is installed, or as asked for.

An operation has up to three implementations that give the same numbers: `reference` (plain torch, any device), `triton`
(accelerators) and `cpu`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

TRITON_DEVICES = ("cuda", "xpu")  # torch calls ROCm devices cuda
MODES = ("auto", "reference", "triton", "cpu")

MODULES = (  # those with operations
    "adamw", "flash", "glu", "grouped", "linear_loss", "lion", "loss", "norm", "permutation", "quantize", "rotary", "routing", "sgd", "signs", "squares",
)  # fmt: skip

_mode = "auto"


@dataclass
class Operation:
    """A hot operation under one name. `replacement`, if set, takes the place of all implementations."""

    name: str
    reference: Callable[..., Any]
    triton: Callable[..., Any] | None = None
    cpu: Callable[..., Any] | None = None
    replacement: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        OPERATIONS[self.name] = self

    def on(self, device: torch.device) -> Callable[..., Any]:
        """What runs for tensors on `device`."""
        return self.replacement or self.implementation(device)

    def implementation(self, device: torch.device) -> Callable[..., Any]:
        """Ours for tensors on `device`, replaced or not."""
        if self.triton is not None and (
            _mode == "triton" or (_mode == "auto" and device.type in TRITON_DEVICES and has_triton())
        ):
            return self.triton
        if self.cpu is not None and device.type == "cpu" and _mode in ("auto", "cpu"):
            return self.cpu
        return self.reference


OPERATIONS: dict[str, Operation] = {}


def load_all() -> None:
    """Import every operation, so that OPERATIONS is complete."""
    for module in MODULES:
        importlib.import_module(f"{__package__}.{module}")


@functools.cache
def has_triton() -> bool:
    """Is triton installed? Doesn't import it."""
    return importlib.util.find_spec("triton") is not None


@contextmanager
def using(mode: str) -> Iterator[None]:
    """Inside, operations run the named implementation where they have it ("triton" on CPU tensors needs Triton's interpreter)."""
    global _mode
    if mode not in MODES:
        raise ValueError(f"no kernel mode {mode!r}; there are {', '.join(MODES)}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def replace(name: str, implementation: Callable[..., Any] | None) -> None:
    """Let `implementation` stand for operation `name` everywhere, with the signature of its reference; None puts ours back.

    Raises KeyError with the names there are.
    """
    load_all()
    if name not in OPERATIONS:
        raise KeyError(f"no operation {name!r}; there are {', '.join(sorted(OPERATIONS))}")
    OPERATIONS[name].replacement = implementation
