"""Slot `kernel`: norms that compute in float64, whatever the inputs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from partita.errors import ConfigError
from partita_kernels import norm

Tensor = torch.Tensor


def make_exact(operation: str) -> Callable[..., Any]:
    """The signature is that of the operation's reference in partita_kernels."""
    if operation != "norm":
        raise ConfigError(f"example_exact has no {operation!r}\n    -> It has 'norm'.")
    return exact_norm


def exact_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, ...]:
    """x, residual [R, C] -> y [R, C], their sum [R, C], means [R], reciprocal deviations [R]."""
    wide = [None if t is None else t.double() for t in (x, residual, weight, bias)]
    y, total, mean, rstd = norm.reference(*wide, eps, center)  # type: ignore[arg-type]
    return y.to(x.dtype), total.to(x.dtype), mean.float(), rstd.float()
