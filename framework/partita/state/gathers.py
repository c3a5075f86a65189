"""When the weights of units are whole: gathered before forward and backward, the next ones meanwhile, freed after their last use for a while.

A unit that is needed again soon stays: `prefetch` units besides the one at work are whole at any time, and never more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partita.plan.activations import tensors_in
from partita.state.order import Order, SeenOrder, StageOrder
from partita.state.unit import Unit
from partita.state.units import Stages


class Gathers:
    """The hooks on a model and its blocks.

    root: unit of what is in no block; it stays whole from the first forward to the next change of weights. prefetch: blocks gathered ahead.
    limit: bytes of weights that are whole at once, at most; None: what `prefetch` makes of it. late: gathers that nobody had begun when they
    were needed.
    """

    def __init__(
        self, model: nn.Module, root: Unit, blocks: Sequence[Unit], stages: Stages | None, prefetch: int, limit: int | None
    ) -> None:
        self.model, self.root, self.blocks, self.stages = model, root, list(blocks), stages
        self.prefetch, self.limit = prefetch, limit
        self.in_backward = False
        self.late = 0
        self._keep_all = 0
        self._number = {id(unit): i for i, unit in enumerate(self.blocks)}
        self._working: Unit | None = None  # whose backward is under way
        self._seen = SeenOrder(len(self.blocks))
        self._looking = SeenOrder(len(self.blocks))  # of passes without gradients
        self._stages: StageOrder | None = None
        if stages is not None:
            names = {unit.name: i for i, unit in enumerate(self.blocks)}
            self._stages = StageOrder([[names[name] for name in stage] for stage in stages.blocks])

    def install(self) -> None:
        """Register the hooks."""
        if self.stages is None:  # else an executor runs parts of the model, and asks for the root itself
            self.model.register_forward_pre_hook(self._before_model)
            self.model.register_forward_hook(self._after_model)
        for i, unit in enumerate(self.blocks):
            unit.module.register_forward_pre_hook(lambda _m, _a, i=i: self._before_forward(i))
            unit.module.register_forward_hook(lambda _m, _a, out, i=i: self._after_forward(i, out))

    # ------------------------------------------------------------------ passes

    def begin_step(self) -> None:
        """Before the first micro-batch of an update."""
        self._seen.begin()

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """The backward that ends a pass; `last` before the weights change."""
        self._seen.wraps = not last
        yield
        self._seen.end()

    @contextmanager
    def backwards(self) -> Iterator[None]:
        """While any backward runs."""
        self.in_backward, self._working = True, None
        try:
            yield
        finally:
            self.in_backward, self._working = False, None

    def first(self) -> None:
        """Begin with what the next forward needs first."""
        self.root.gather()
        for i in self._order().first():
            self.blocks[i].gather()

    def done(self, unit: Unit, among: int | None = None) -> None:
        """A use of a unit has ended: free it, unless it is needed soon. among: the next so many blocks; default: all that are kept."""
        among = self.prefetch + 1 if among is None else among
        if unit is self.root or self._keep_all or self._order().keeps(self._number[id(unit)], among):
            return
        unit.free()

    def _order(self) -> SeenOrder | StageOrder:
        if self._stages is not None:
            return self._stages
        return self._seen if torch.is_grad_enabled() or self.in_backward else self._looking

    # ------------------------------------------------------------------ hooks

    def _before_model(self, _module: nn.Module, _args: Any) -> None:
        self._looking.begin()
        if not torch.is_grad_enabled():  # what a training pass has kept would come on top
            for unit in self.blocks:
                self.done(unit)
        self.first()
        self.root.wait_gathered()

    def _after_model(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            return
        self._looking.end()
        if not self._keep_all:
            for unit in self.blocks:
                unit.free()

    def _before_forward(self, i: int) -> None:
        self._use(i, self._order(), i)

    def _after_forward(self, i: int, output: Any) -> None:
        if not self.in_backward:
            self.done(self.blocks[i])
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _g, i=i: self._before_backward(i))

    def _before_backward(self, i: int) -> None:
        """The gradient of block i's output is there. All that forward did later has gone backward by now: autograd takes it first."""
        before, self._working = self._working, self.blocks[i]
        if before is not None and before is not self._working:
            self.done(before)
        self._use(i, self._order(), ~i)

    # ------------------------------------------------------------------ one use

    def _use(self, i: int, order: Order, use: int) -> None:
        """Have block i whole, and begin with those that come next."""
        unit = self.blocks[i]
        for k in order.meet(use):
            if k != i:
                self.done(self.blocks[k], self.prefetch)
        if not unit.whole:
            self.late += 1
            self._make_room(unit)
            unit.gather()
        ahead = order.ahead(self.prefetch + 1)
        for k in ahead[: self.prefetch]:
            if not self._fits(self.blocks[k]):
                break
            self.blocks[k].gather()
        for k in ahead[self.prefetch :]:
            self.blocks[k].fetch()
        unit.wait_gathered()

    def _fits(self, unit: Unit) -> bool:
        """Whether the bounds hold when `unit` is whole too. Weights that are never freed don't count."""
        if unit.whole or not unit.bytes:
            return True
        whole = [other for other in self.blocks if other.bytes and other.whole]
        if len(whole) > self.prefetch:
            return False
        return self.limit is None or sum(u.bytes for u in (self.root, unit, *whole)) <= self.limit

    def _make_room(self, unit: Unit) -> None:
        """Free what is whole and isn't used until the bounds hold with `unit`: a pass may have left its usual order."""
        for other in self.blocks if not self._keep_all else ():
            if self._fits(unit):
                return
            if other.whole:
                other.free()

    # ------------------------------------------------------------------ all of them

    @contextmanager
    def all_whole(self) -> Iterator[None]:
        """All weights whole, as long as the context lasts. Collective."""
        units = (*self.blocks, self.root)
        self._keep_all += 1
        for unit in units:
            unit.gather()
        for unit in units:
            unit.wait_gathered()
        try:
            yield
        finally:
            self._keep_all -= 1
            if not self._keep_all:
                for unit in units:
                    unit.free()
