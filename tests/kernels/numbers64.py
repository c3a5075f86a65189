"""Comparing an operation and its gradients with the same function in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Norm of the difference over the norm. Low precision: inputs are exact, so what is left is one rounding of each output (2^-9, 2^-12),
# with room for the intermediate sum of a residual.
BOUNDS = {F32: 1e-6, BF16: 4e-3, F16: 5e-4}


def mixed(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For parametrize, in the place of a full product: all pairs of the first two columns, with values of the others that go round, so that
    each of them meets each value of the first two where these are enough."""
    a, b, *others = columns
    return [(x, y, *(c[(i + j) % len(c)] for c in others)) for i, x in enumerate(a) for j, y in enumerate(b)]


def side_by_side(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each column, each value at least once: as many rows as the longest column has values."""
    return [tuple(c[i % len(c)] for c in columns) for i in range(max(map(len, columns)))]


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers from the generator that the fixture `fresh_seed` set."""
    return torch.randn(tuple(shape)).to(dtype).to(device)


def gradients(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output, inputs))


def compare(
    ours: Callable, exact: Callable, inputs: Sequence[torch.Tensor], bound: float, terms: tuple[float, float] = (0.0, 0.0)
) -> None:
    """Outputs and gradients of `ours` within `bound` of `exact` on float64 copies of the inputs.

    terms: where a 0-d output, or its gradient, is a difference of numbers that may be much larger than it is, their size: no formula gets more digits
    of the difference than its terms have.
    """
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    got, want = as_list(ours(*mine)), as_list(exact(*theirs))
    for name, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert error(a, b, terms[0]) <= bound, f"output {name}: {error(a, b, terms[0]):.2e}"
    weights = [fresh(a.shape, a.dtype, a.device) for a in got]
    slopes = terms[1] * weights[0].abs().item() if terms[1] else 0.0
    torch.autograd.backward(got, weights)
    torch.autograd.backward(want, [w.double() for w in weights])
    for name, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.grad is not None
        assert a.grad.dtype == a.dtype
        assert error(a.grad, b.grad, slopes) <= 1.5 * bound, f"gradient {name}: {error(a.grad, b.grad, slopes):.2e}"


def as_list(value: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def error(got: torch.Tensor, want: torch.Tensor, terms: float = 0.0) -> float:
    """Error relative to the norm, or to the size of the terms of a difference; elements that aren't finite have to agree."""
    a, b = got.detach().double(), want.detach().double()
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite)
    size = max(b[finite].norm().item(), terms)
    return (a[finite] - b[finite]).norm().item() / (size if size else 1.0)
