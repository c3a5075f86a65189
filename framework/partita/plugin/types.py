"""Values that hooks return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ConfigContribution:
    """What a plug-in adds to the config tree.

    packages: importable packages that hold YAML groups (`their_conf`), appended to Hydra's search path as `pkg://...`.
    nodes: top-level config node -> dataclass schema with defaults.
    sections: sections of the plan that this plug-in owns; two owners of one section are refused.
    """

    packages: tuple[str, ...] = ()
    nodes: Mapping[str, type] = field(default_factory=dict)
    sections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transform:
    """A named step from the model on the meta device to the model that is trained.

    apply(model, context) returns the model to go on with; context is the `partita.train.run.Run`. `after`/`before` name other
    transforms; names that nobody provides are ignored. The usual anchors are, in order: stage_split, tensor_parallel,
    expert_parallel, adapter, recompute, compile, state.
    """

    name: str
    apply: Callable[[nn.Module, Any], nn.Module]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """One line of an estimate.

    category: parameters, gradients, optimizer, activations, buffers, communication, compute, or another word.
    what: words for the table. bytes: on the fullest rank (memory) or sent by one rank in a step (communication).
    place: accelerator, host, file for memory; intra, inter for links. seconds: of one step, if nothing else ran.
    overlap: share of the step's arithmetic beside which this can run, 0 to 1; 0: everything waits for it.
    repeated: made in each micro-batch's pass through a stage, so that stages which wait for each other wait for this too.
    """

    category: str
    what: str
    bytes: int = 0
    place: str = "accelerator"
    seconds: float = 0.0
    exact: bool = False
    overlap: float = 0.0
    repeated: bool = False


@dataclass(frozen=True)
class Choices:
    """The ways in which a plug-in's keys that are `auto` can be filled in.

    settings: config key -> value, all of them for the same keys; the planner takes the one whose plan is the fastest that fits.
    needed: whether the plug-in can't decide by itself. Where no plug-in needs the planner, nobody is asked to choose.
    """

    settings: tuple[Mapping[str, Any], ...]
    needed: bool = True
