"""A few optimizer steps on fresh random numbers, for tests that compare implementations, formats and cuts."""

from __future__ import annotations

import torch
from numbers64 import F32

from partita_kernels import Rounding, adamw_, lion_, sgd_

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


def lion_run(
    sizes, grad_dtype, copy_dtype, *, dtype=F32, scale=0.7, skip=None, steps=3, seed=0, device=CPU, rounding=None
) -> Ranges:
    r = Ranges(sizes, 1, copy_dtype, dtype, device, seed)
    for _ in range(steps):
        lion_(
            r.params, r.gradients(grad_dtype), r.states[0], copies=r.copies, lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1,
            scale=torch.tensor(scale, device=device), skip=skip, rounding=rounding,
        )  # fmt: skip
    return r


class Narrow:
    """Adam with weights and moments in few bits: uint8 moments with scales, or bfloat16 ones."""

    def __init__(self, sizes, param, state, device, seed=0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes, self.device = sizes, device
        self.starts = [0, *torch.tensor([-(-n // 256) * 256 for n in sizes]).cumsum(0).tolist()][: len(sizes)]
        self.params = [torch.randn(n, generator=self.generator).to(param).to(device) for n in sizes]
        self.states = [[torch.zeros(n, dtype=state, device=device) for n in sizes] for _ in range(2)]
        blocks = [-(-n // 256) for n in sizes]
        self.scales = [[torch.zeros(n, device=device) for n in blocks] for _ in range(2)] if state == torch.uint8 else None

    def step(self, number, gradients=None, random=True, lr=1e-2, cut=None, **more) -> None:
        grads = gradients or [torch.randn(n, generator=self.generator).bfloat16().to(self.device) for n in self.sizes]
        lists = [self.params, grads, *self.states]
        starts = self.starts
        scales = self.scales
        if cut:
            starts = [s + at for s, n in zip(self.starts, self.sizes) for at in range(0, n, cut)]
            lists = [[piece for t in group for piece in t.split(cut)] for group in lists]
            scales = scales and [[piece for t in group for piece in t.split(cut // 256)] for group in scales]
        adamw_(
            *lists, copies=[None] * len(lists[0]), step=number, lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1,
            scale=torch.ones((), device=self.device), scales=scales, rounding=Rounding(5, number, starts) if random else None, **more,
        )  # fmt: skip

    def tensors(self):
        groups = [self.params, *self.states, *(self.scales or [])]
        return [t for group in groups for t in group]
