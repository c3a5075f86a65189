"""Reductions of gradients behind backward: units are reduced while others compute, in one order on all ranks.

The order is that in which all ranks together saw gradients complete in the first update, whatever the order in which one of them
finishes them later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partita.state.bucket import Bucket
from partita.state.gathers import Gathers
from partita.state.unit import Unit

Gradient = torch.Tensor | Callable[[], torch.Tensor]  # or what computes it


class Reductions:
    """Takes gradients from autograd into the buckets of their units, and starts and ends reductions.

    units: in the order in which backward is expected to complete them. learns: whether the first update finds the real order; stages of
    a pipeline keep the expected one.
    """

    def __init__(self, units: Sequence[Unit], gathers: Gathers, learns: bool) -> None:
        self.order = [u for u in units if u.trainable]
        self._gathers, self._learns = gathers, learns
        self._under_way: Sequence[Unit] = ()  # to be reduced by the backward under way
        self._next = 0  # the first of them that isn't issued yet
        self._due: Mapping[Unit, bool] = {}
        self._ended: list[Unit] = []  # units in the order in which their gradients were complete
        self._pending: list[Unit] = []
        self._stash: list[tuple[nn.Parameter, Gradient]] | None = None
        self._slots: dict[nn.Parameter, tuple[Unit, Bucket, int]] = {}
        self._hooks: list[Any] = []  # handles
        self._install()

    def _install(self) -> None:
        # autograd may know a parameter for longer than anyone else, and its hooks must not keep all states and groups alive
        reductions = weakref.ref(self)

        def arrived(parameter: Any) -> None:
            alive = reductions()
            if alive is not None:
                alive._arrived(parameter)

        for unit in self.order:
            for bucket in unit.trainable:
                for k, parameter in enumerate(bucket.parameters):
                    assert parameter is not None
                    self._slots[parameter] = (unit, bucket, k)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def remove(self) -> None:
        """Take no gradient any more."""
        for hook in self._hooks:
            hook.remove()

    # ------------------------------------------------------------------ backward

    @contextmanager
    def backward_of(self, units: Sequence[Unit], due: Mapping[Unit, bool]) -> Iterator[None]:
        """Run the backward of `units` inside. Ranks that cut their states together run the same backwards in the same order.

        due: units whose gradients are reduced as soon as they are complete, at the end at the latest -> whether these are their last
        of this update. The gradients of other units stay whole.
        """
        for unit in units:
            unit.arrived = 0
        self._under_way, self._due = [u for u in self.order if u in due], due
        self._next = 0
        self._ended.clear()
        with self._gathers.backwards():
            yield
        self._issue_ready()
        while self._pending:
            self._finish(self._pending.pop(0))
        self._under_way = ()
        for unit in units:
            self._gathers.done(unit)

    @contextmanager
    def stashed(self, stash: list[tuple[nn.Parameter, Gradient]]) -> Iterator[None]:
        """Gradients that arrive inside are put into `stash`, for `collect`."""
        self._stash = stash
        try:
            yield
        finally:
            self._stash = None

    def collect(self, stash: list[tuple[nn.Parameter, Gradient]], due: Mapping[Unit, bool]) -> None:
        """Compute what is left to compute in `stash` and add it to the buckets, unit by unit; those of `due` are then reduced."""
        by_unit: dict[Unit, list[tuple[Bucket, int, Gradient]]] = {}
        for parameter, gradient in stash:
            unit, bucket, segment = self._slots[parameter]
            by_unit.setdefault(unit, []).append((bucket, segment, gradient))
        stash.clear()
        ordered = [u for u in self.order if u in by_unit or u in due]
        with self.backward_of(ordered, due):
            for unit in ordered:
                for bucket, segment, gradient in by_unit.pop(unit, ()):
                    bucket.collect(segment, gradient if isinstance(gradient, torch.Tensor) else gradient())
                unit.arrived = unit.expected
                self._issue_ready()

    def _arrived(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # an operation left it for later, or had none to give
            return
        if self._stash is not None:
            self._stash.append((parameter, gradient))
            return
        unit, bucket, segment = self._slots[parameter]
        bucket.collect(segment, gradient)
        unit.arrived += 1
        if unit.arrived == unit.expected:
            if not unit.partly_frozen:  # frozen weights may still be needed for the gradient of the input
                self._gathers.done(unit)
            self._ended.append(unit)
            self._issue_ready()

    def _issue_ready(self) -> None:
        """Start reductions in the fixed order, as far as units are complete; at most two are under way."""
        while self._next < len(self._under_way):
            unit = self._under_way[self._next]
            if unit.arrived < unit.expected and self._gathers.in_backward:
                return
            self._next += 1
            for bucket in unit.trainable:
                if self._due[unit] or bucket.groups.shard.size > 1:  # what is summed in place must be summed once
                    bucket.reduce()
            self._pending.append(unit)
            while len(self._pending) > 1:
                self._finish(self._pending.pop(0))

    def _finish(self, unit: Unit) -> None:
        for bucket in unit.trainable:
            bucket.wait_reduced(self._due[unit])

    # ------------------------------------------------------------------ the order

    def places(self, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """In the first update: for each unit of `order` the place at which it was complete here, one 1-D tensor. Later nothing."""
        if not self._learns:
            return []
        place = {id(unit): i for i, unit in enumerate(self._ended)}
        found = [float(place.get(id(unit), len(self.order))) for unit in self.order]
        return [torch.tensor(found, dtype=dtype, device=device)]

    def learn(self, places: list[float]) -> None:
        """From now on reduce in the order in which gradients are complete: that of all ranks together, so that it is one."""
        self._learns = False
        self.order = [u for _, u in sorted(zip(places, self.order, strict=True), key=lambda pair: pair[0])]
