"""The plan: a frozen value with one section for each question, that one engine carries out.

Nothing here knows a ZeRO stage or a preset: placements are sets of mesh axes, tiers are names of places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# Outermost first. Ranks of one node are neighbours on the innermost axes.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
# The axes over which samples (or, for context, tokens of a sample) differ; gradients are summed over all of them.
DATA_AXES = ("replicate", "shard")
GRADIENT_AXES = ("replicate", "shard", "context")
EXPERT_AXES = ("shard",)  # along which the expert axis is folded: its degree is that of `shard`


@dataclass(frozen=True)
class Layout:
    """The mesh: how many ranks lie along each axis, where stages are cut, how parameters are split over `tensor`.

    stage_cuts: first unit of each pipeline stage but the first (empty without a pipeline).
    stage_ranks: rank of the pipeline axis that computes each stage; a rank may have several (empty: each one stage, in order).
    styles: (module path pattern, tensor style) pairs, first match wins (partita.plan.styles).
    sequence_parallel: activations between matrices are cut by tokens over `tensor`. spread_kv: heads of keys and values may be shared
    by several ranks along `tensor`. context_method: `ring` or `ulysses`, how attention sees the tokens of other context ranks.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    stage_cuts: tuple[int, ...] = ()
    stage_ranks: tuple[int, ...] = ()
    styles: tuple[tuple[str, str], ...] = ()
    sequence_parallel: bool = False
    spread_kv: bool = False
    context_method: str = "ring"

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """All ranks of the mesh (expert parallelism folds over existing axes)."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    def size(self, axes: tuple[str, ...]) -> int:
        """Product of the degrees of `axes`."""
        product = 1
        for axis in axes:
            product *= getattr(self, axis)
        return product


@dataclass(frozen=True)
class Placement:
    """Over which mesh axes each state is cut; an empty tuple means replicated.

    parameters: storage of the weights between uses (gathered for forward and backward where cut).
    gradients: where a cut gradient lives between micro-batches; empty keeps whole gradients until the last one.
    optimizer: master weights and moments. Must contain the axes of `parameters` and `gradients`.
    """

    parameters: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tier:
    """Where one state lives: `accelerator` (where compute runs, the CPU included), `host` or `file`; `fraction` of it, 0 to 1."""

    place: str = "accelerator"
    fraction: float = 1.0


@dataclass(frozen=True)
class Tiers:
    """A tier for each kind of state. `path` is the folder of the file tier."""

    parameters: Tier = Tier()
    gradients: Tier = Tier()
    optimizer: Tier = Tier()
    activations: Tier = Tier()
    path: str | None = None


@dataclass(frozen=True)
class LossScale:
    """Loss scale (Micikevicius et al. 2018, section 3.2).

    Where dynamic, it is divided by `factor` after `hysteresis` overflows in a row and multiplied by it after `interval` good steps.
    """

    initial: float = 65536.0
    factor: float = 2.0
    interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0
    dynamic: bool = True


@dataclass(frozen=True)
class Precision:
    """Names of torch dtypes for each number that is kept or sent.

    compute: weights and activations of forward and backward. gradient: accumulation over micro-batches.
    reduce: on the wire of the gradient reduction (sums are always made in at least float32).
    master: weights that the optimizer updates (equal to compute: no separate copy). optimizer: moments.
    """

    compute: str = "float32"
    gradient: str = "float32"
    reduce: str = "float32"
    master: str = "float32"
    optimizer: str = "float32"
    loss_scale: LossScale | None = None


@dataclass(frozen=True)
class Activations:
    """What each unit keeps for backward: `keep`, `full` (recompute all), `selective` (recompute modules that match `patterns`) or
    `operators` (recompute all but the outputs of `operators`, see `partita.plan.operators`).

    units: decision of each unit that differs from `default`, by unit name.
    """

    default: str = "keep"
    units: tuple[tuple[str, str], ...] = ()
    patterns: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    def of(self, unit: str) -> str:
        """The decision for the unit of that name."""
        return dict(self.units).get(unit, self.default)


@dataclass(frozen=True)
class Wire:
    """How one collective travels: `algorithm` (flat, hierarchical) and `format` (native, bfloat16, float16, ...).

    size: bytes of an element on the wire, where the format is no dtype.
    """

    algorithm: str = "flat"
    format: str = "native"
    size: float | None = None


@dataclass(frozen=True)
class Collectives:
    """A wire for each purpose. provider: name in slot `collective` of what carries them out."""

    gradient_reduce: Wire = Wire()
    parameter_gather: Wire = Wire()
    expert_dispatch: Wire = Wire()
    provider: str = "default"


@dataclass(frozen=True)
class Schedule:
    """How a global batch is worked through.

    global_batch, micro_batch: sequences. micro_batches: forward/backward passes a rank makes for one optimizer step.
    name: pipeline schedule, `none` without a pipeline. reduce_every: micro-batches between reductions where gradients are cut.
    in_flight: for each pipeline stage, micro-batches whose activations it keeps when its rank keeps most. bubble: time that a rank of
    the pipeline waits, as a share of the time that it computes. gather: for how long a stage's cut weights stay whole: `action` (one
    forward or backward, block by block), `run` (until the rank turns to another stage), `step`.
    """

    global_batch: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    name: str = "none"
    reduce_every: int = 1
    in_flight: tuple[int, ...] = ()
    bubble: float = 0.0
    gather: str = "action"


@dataclass(frozen=True)
class Plan:
    """All sections, and whatever plug-ins add under their own name in `extensions`."""

    layout: Layout = Layout()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    placement: Placement = Placement()
    tiers: Tiers = Tiers()
    activations: Activations = Activations()
    collectives: Collectives = Collectives()
    extensions: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy can't be pickled; plans travel to spawned ranks.
        sections = tuple(getattr(self, name) for name in SECTIONS)
        return (_rebuild, (sections, dict(self.extensions)))


# In the order in which they are decided: each section may read those before it.
SECTIONS = ("layout", "schedule", "precision", "placement", "tiers", "activations", "collectives")


def _rebuild(sections: tuple[Any, ...], extensions: dict[str, Any]) -> Plan:
    named: dict[str, Any] = dict(zip(SECTIONS, sections, strict=True))
    return Plan(**named, extensions=MappingProxyType(extensions))
