"""Comparing an operation and its gradients with the same function in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Norm of the difference over the norm. Low precision: inputs are exact, so what is left is one rounding of each output (2^-9, 2^-12),
# with room for the intermediate sum of a residual.
BOUNDS = {F32: 1e-6, BF16: 4e-3, F16: 5e-4}


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers from the generator that the fixture `fresh_seed` set."""
    return torch.randn(tuple(shape)).to(dtype).to(device)


def gradients(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output, inputs))


def compare(ours: Callable, exact: Callable, inputs: Sequence[torch.Tensor], bound: float) -> None:
    """Outputs and gradients of `ours` within `bound` of `exact` on float64 copies of the inputs."""
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    got, want = as_list(ours(*mine)), as_list(exact(*theirs))
    for name, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert error(a, b) <= bound, f"output {name}: {error(a, b):.2e}"
    weights = [fresh(a.shape, a.dtype, a.device) for a in got]
    torch.autograd.backward(got, weights)
    torch.autograd.backward(want, [w.double() for w in weights])
    for name, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert a.grad is not None
        assert a.grad.dtype == a.dtype
        assert error(a.grad, b.grad) <= 1.5 * bound, f"gradient {name}: {error(a.grad, b.grad):.2e}"


def as_list(value: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error, in the norm; elements that aren't finite have to agree."""
    a, b = got.detach().double(), want.detach().double()
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite)
    size = b[finite].norm().item()
    return (a[finite] - b[finite]).norm().item() / (size if size else 1.0)
