"""A few optimizer steps on fresh random numbers, for tests that compare implementations, formats and cuts."""

from __future__ import annotations

import torch
from numbers64 import F32

from partita_kernels import adamw_, sgd_

CPU = torch.device("cpu")


class Ranges:
    """Parameters, states and copies of some ranges, and their gradients step by step; all from one seed."""

    def __init__(self, sizes, states, copy_dtype, dtype, device, seed) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes, self.device = sizes, device
        self.params = [torch.randn(n, generator=self.generator).to(dtype).to(device) for n in sizes]
        self.states = [[torch.zeros_like(p) for p in self.params] for _ in range(states)]
        self.copies = [None if copy_dtype is None else torch.zeros(n, dtype=copy_dtype, device=device) for n in sizes]

    def gradients(self, dtype):
        return [torch.randn(n, generator=self.generator).to(dtype).to(self.device) for n in self.sizes]


def adam_run(
    sizes, grad_dtype, copy_dtype, *, dtype=F32, decoupled=True, scale=0.7, skip=None, steps=3, seed=0, cut=None, device=CPU
) -> Ranges:
    """cut: the size of pieces handed over."""
    r = Ranges(sizes, 2, copy_dtype, dtype, device, seed)

    def pieces(tensors):
        return tensors if cut is None else [piece for t in tensors for piece in (t.split(cut) if t is not None else [None])]

    for step in range(1, steps + 1):
        adamw_(
            pieces(r.params), pieces(r.gradients(grad_dtype)), *map(pieces, r.states), copies=pieces(r.copies), step=step,
            lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled,
            scale=torch.tensor(scale, device=device), skip=skip,
        )  # fmt: skip
    return r


def sgd_run(
    sizes, grad_dtype, copy_dtype, *, dtype=F32, momentum=0.9, nesterov=False, skip=None, steps=3, seed=0, device=CPU
) -> Ranges:
    r = Ranges(sizes, int(momentum != 0), copy_dtype, dtype, device, seed)
    for _ in range(steps):
        sgd_(
            r.params, r.gradients(grad_dtype), r.states[0] if momentum else None, copies=r.copies, lr=1e-2, momentum=momentum,
            nesterov=nesterov, weight_decay=0.1, scale=torch.tensor(0.7, device=device), skip=skip,
        )  # fmt: skip
    return r


def sgd_once(param, grad, copy=None, lr=1.0) -> None:
    """Plain descent: param -= lr * grad."""
    sgd_(
        [param], [grad], None, copies=[copy], lr=lr, momentum=0.0, nesterov=False, weight_decay=0.0,
        scale=torch.ones((), device=param.device),
    )  # fmt: skip
