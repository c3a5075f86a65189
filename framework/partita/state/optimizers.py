"""What an update rule is (slot `optimizer`), and the two rules with kernels of their own. The others are in `partita.state.rules`.

One call updates all ranges of one hyper-parameter group in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from partita.plan.plan import Plan
from partita_kernels import adamw_, lion_, sgd_
from partita_kernels.rounding import BLOCK8, Rounding


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
    of a parameter; `tensor` between parameters), `per_tensor` (see `Update`), `narrow` (its states may be bfloat16), `formats`, a
    method that gives a `State` for each name, `refuses(shape)`, the reason why such a parameter can't be updated, or "", `options`, the
    names of `optimizer.options` that its builder reads, and `traffic`, what it wants of the gradients on the wire (whoever provides the
    collectives says what that may be).
    """

    def states(self) -> tuple[str, ...]:
        """Names of the states; all start at zero, and each is as long as the weights unless `formats` says otherwise."""

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """Change weights, states and copies in place. step counts from 1; scale (0-d float32) multiplies the gradients first."""


BLOCK = BLOCK8  # elements of the layout policy `block`


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


def rounding_of(update: Update, step: int) -> Rounding | None:
    """Narrow states are rounded at random: to nearest, a moment that changes by less than half a unit would never move."""
    narrow = any(t.dtype != torch.float32 for values in update.states.values() for t in values[:1])
    return Rounding(0, step, update.keys) if narrow else None


def rule_reason(rule: Rule, shape: tuple[int, ...], plan: Plan, cut: bool) -> str:
    """Why a rule can't update a tensor of that shape under a plan; "" where it can. cut: whether model axes cut the tensor."""
    refuses: Callable[[tuple[int, ...]], str] = getattr(rule, "refuses", lambda _: "")
    name = type(rule).__name__
    if reason := refuses(shape):
        return reason
    whole = is_per_tensor(rule) or policy_of(rule) != "element"
    if whole and cut:
        return f"{name} needs whole tensors, and tensor or expert parallelism cuts this one"
    away = {t.place for t in (plan.tiers.parameters, plan.tiers.gradients, plan.tiers.optimizer)} - {"accelerator"}
    if whole and away:
        return f"{name} needs whole tensors or blocks, which states on tier {min(away)!r} are not"
    if plan.precision.optimizer != "float32" and not getattr(rule, "narrow", False):
        return f"{name} has no states in {plan.precision.optimizer}"
    return ""


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1); decoupled: AdamW (Loshchilov and Hutter 2019, algorithm 2).

    bits8: moments of 8 bits with a scale for each block of 256 elements (in the spirit of Dettmers et al. 2022; see `adamw_`): 2.03 bytes
    for each weight in place of 8.
    """

    beta1: float
    beta2: float
    eps: float
    decoupled: bool
    bits8: bool = False
    narrow = True

    @property
    def policy(self) -> str:
        """See `Rule`."""
        return "block" if self.bits8 else "element"

    def states(self) -> tuple[str, ...]:
        """First and second moment, and their scales."""
        return ("exp_avg", "exp_avg_sq") + (("exp_avg_scale", "exp_avg_sq_scale") if self.bits8 else ())

    def formats(self) -> dict[str, State]:
        """See `Rule`."""
        if not self.bits8:
            return dict.fromkeys(self.states(), State())
        codes, scale = State("uint8"), State("float32", BLOCK)
        return {"exp_avg": codes, "exp_avg_sq": codes, "exp_avg_scale": scale, "exp_avg_sq_scale": scale}

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        states = update.states
        adamw_(
            list(update.master),
            list(update.gradients),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
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
            scales=(list(states["exp_avg_scale"]), list(states["exp_avg_sq_scale"])) if self.bits8 else None,
            rounding=rounding_of(update, step),
        )


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum; decay is decoupled."""

    beta1: float
    beta2: float
    narrow = True

    def states(self) -> tuple[str, ...]:
        """The momentum."""
        return ("exp_avg",)

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: torch.Tensor) -> None:
        """See `Rule`."""
        lion_(
            list(update.master),
            list(update.gradients),
            list(update.states["exp_avg"]),
            copies=list(update.copies),
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            scale=scale,
            rounding=rounding_of(update, step),
        )


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum as torch.optim.SGD defines it (Sutskever et al. 2013 up to the place of lr)."""

    momentum: float
    nesterov: bool
    narrow = True

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
            rounding=rounding_of(update, step),
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


def make_adamw8bit(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return Adam(config.betas[0], config.betas[1], config.eps, decoupled=True, bits8=True)


def make_lion(config: Any) -> Rule:
    """`config` is the optimizer node; `betas` of the paper are 0.9 and 0.99."""
    return Lion(config.betas[0], config.betas[1])


def rule_names(config: Any) -> list[str]:
    """Names in slot `optimizer` that an optimizer node asks for: its own, then those of groups."""
    return list(dict.fromkeys([config.name, *(g.optimizer for g in config.groups if g.optimizer)]))
