"""What the plug-in adds to the plan, under the name `compression`."""

from __future__ import annotations

from dataclasses import dataclass

EXTENSION = "compression"


@dataclass(frozen=True)
class Traffic:
    """What travels for the gradients of the parameters under one update rule.

    warmup: updates in which they travel natively; None: always. momentum: decay of the momentum that each rank makes of its own
    gradients and that travels in their place after the warm-up (1-bit Adam); None: gradients travel. variance: updates after which the
    interval between native ones doubles (0/1 Adam); 0: none of them is native.
    """

    warmup: int | None = 0
    momentum: float | None = None
    variance: int = 0

    def native(self, update: int) -> bool:
        """Whether the gradients of that update (from 1) travel as they are."""
        if self.warmup is None:
            return True
        return update <= self.warmup and (not self.variance or variance_update(update, self.variance)[0])


def variance_update(update: int, scaler: int) -> tuple[bool, int]:
    """Whether 0/1 Adam changes the second moment in an update (from 1), and how often it has until then.

    `scaler` times in every update, then `scaler` times in every second one, in every fourth one, and so on (Lu et al. 2022, section 4.2).
    """
    doublings = ((update - 1) // scaler + 1).bit_length() - 1
    since = update - ((1 << doublings) - 1) * scaler
    return since % (1 << doublings) == 0, doublings * scaler + (since >> doublings)


@dataclass(frozen=True)
class Local:
    """every: updates between meetings of the groups. momentum: Nesterov's, None: the groups' average as it is. lr: of that method.

    format: what the groups' ways travel as at a meeting.
    """

    every: int
    lr: float = 1.0
    momentum: float | None = None
    format: str = "native"


@dataclass(frozen=True)
class Settings:
    """warmup: updates that travel natively before gradients are compressed. feedback: keep errors. slow_only: leave what stays
    inside a node native. node_ranks: ranks of a node, whose links count as fast. traffic: of each update rule, in the order of the
    run's rules, where one of them wants something of its own; empty: all as `warmup` says. rank: of
    PowerSGD, 0 without it. density: of top-k. local: groups of ranks that train for themselves.
    average, reset: of errors, see `CompressionConfig`. stochastic: round at random.
    """

    warmup: int = 0
    feedback: bool = False
    slow_only: bool = False
    node_ranks: int = 1
    traffic: tuple[Traffic, ...] = ()
    rank: int = 0
    density: float = 0.0
    local: Local | None = None
    average: float = 0.0
    reset: int = 0
    stochastic: bool = False

    def traffic_of(self, rule: int) -> Traffic:
        """Of the parameters under the rule of that number."""
        return self.traffic[rule] if self.traffic else Traffic(self.warmup)
