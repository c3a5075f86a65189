"""What an update rule is (slot `optimizer`), and the two rules with kernels of their own. The others are in `partita.state.rules`.

One call updates all ranges of one hyper-parameter group in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from partita_kernels import adamw_, sgd_


@dataclass(frozen=True)
class Update:
    """What one update works on: lists of 1-D ranges, range by range.

    master: weights to change. gradients: summed, not yet scaled; may be overwritten. states: by name. copies: low-precision weights
    written in the same pass, or None where the master is what compute reads. keys: for each range a number that is its own (of
    bucket and first element), the same in every layout.

    For rules that are `per_tensor` each range lies in one tensor. shapes: of that tensor. tensors: its place among the `count` tensors
    of the group, which is the same on every rank. total: adds a float tensor over all ranks that hold parts of these tensors, in
    place; every rank must call it equally often, those without any range included.
    """

    master: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    states: Mapping[str, Sequence[torch.Tensor]]
    copies: Sequence[torch.Tensor | None]
    keys: Sequence[int] = ()
    shapes: Sequence[tuple[int, ...]] = ()
    tensors: Sequence[int] = ()
    count: int = 0
    total: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True)
class State:
    """One state of a rule, zero at the start.

    dtype: name of its torch dtype; None: `precision.optimizer`. block: elements of the weights that share one element of the state
    (layout policy `block`). shape: the state's shape from the parameter's (layout policy `tensor`); None: as the weights.
    """

    dtype: str | None = None
    block: int = 1
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


class Rule(Protocol):
    """Slot `optimizer`: a builder `(config.optimizer) -> Rule`.

    A rule may have more: `policy` (how buckets may be cut: `element` anywhere, the default; `block` between blocks of `BLOCK` elements
    of a parameter; `tensor` between parameters), `per_tensor` (see `Update`), `formats`, a method that gives a `State` for each name,
    and `refuses(name, shape)`, the reason why a parameter can't be updated, or "".
    """

    def states(self) -> tuple[str, ...]:
        """Names of the states; all start at zero, and each is as long as the weights unless `formats` says otherwise."""

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """Change weights, states and copies in place. step counts from 1; scale (0-d float32) multiplies the gradients first."""


BLOCK = 256  # elements of the layout policy `block`


def policy_of(rule: Rule) -> str:
    """`element`, `block` or `tensor`."""
    return str(getattr(rule, "policy", "element"))


def is_per_tensor(rule: Rule) -> bool:
    """Whether its updates need whole tensors, or sums over them."""
    return policy_of(rule) == "tensor" or bool(getattr(rule, "per_tensor", False))


def formats_of(rule: Rule) -> dict[str, State]:
    """A `State` for each name."""
    special: Callable[[], Mapping[str, State]] | None = getattr(rule, "formats", None)
    return dict.fromkeys(rule.states(), State()) if special is None else {k: special()[k] for k in rule.states()}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1); decoupled: AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    beta1: float
    beta2: float
    eps: float
    decoupled: bool

    def states(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        adamw_(
            list(update.master),
            list(update.gradients),
            list(update.states["exp_avg"]),
            list(update.states["exp_avg_sq"]),
            copies=list(update.copies),
            step=step,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=weight_decay,
            decoupled=self.decoupled,
            scale=scale,
            skip=None,
        )


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum as torch.optim.SGD defines it (Sutskever et al. 2013 up to the place of lr)."""

    momentum: float
    nesterov: bool

    def states(self) -> tuple[str, ...]:
        """A momentum buffer, if there is momentum."""
        return ("momentum",) if self.momentum else ()

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        sgd_(
            list(update.master),
            list(update.gradients),
            list(update.states["momentum"]) if self.momentum else None,
            copies=list(update.copies),
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=weight_decay,
            scale=scale,
            skip=None,
        )


def make_adamw(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adam(config.betas[0], config.betas[1], config.eps, decoupled=True)


def make_adam(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adam(config.betas[0], config.betas[1], config.eps, decoupled=False)


def make_sgd(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Sgd(config.momentum, config.nesterov)
