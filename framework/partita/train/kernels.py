"""Config node `kernels`: which kernels a run uses. Libraries stand in slot `kernel` beside what plug-ins bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import partita_kernels
from partita.errors import ConfigError, PartitaError, did_you_mean
from partita.models import layers
from partita.plan.problems import Problem
from partita_kernels import dispatch, tuning

Implementation = Callable[..., Any]


# Operations that the reference models' layers alone call, and so only where `kernels.layers` wants kernels.
OF_LAYERS = ("norm", "norm_backward", "rope")
OF_LAYERS_BUT_EXPERTS = ("glu", "glu_backward")  # experts call them wherever layers aren't `never`
FOR_CODE = ("linear_cross_entropy",)  # no part of a run calls it


def check_kernels(config: Any, registry: Any, accelerator: bool) -> list[Problem]:
    """What of the node can't be carried out, or would change nothing. accelerator: will the run have one?"""
    problems = []
    if config.kernels.layers not in layers.WHEN:
        reason = f"{config.kernels.layers!r} says nothing."
        problems.append(Problem("kernels.layers", reason, f"Use one of {', '.join(layers.WHEN)}."))
    if config.kernels.tiles not in tuning.MODES:
        reason = f"{config.kernels.tiles!r} says nothing."
        problems.append(Problem("kernels.tiles", reason, f"Use one of {', '.join(tuning.MODES)}."))
    for operation, name in config.kernels.replace.items():
        key = f"kernels.replace.{operation}"
        try:
            implementation = find(operation, name, registry)
        except PartitaError as error:
            reason, _, remedy = str(error).partition("\n    -> ")
            problems.append(Problem(key, reason, remedy or "Leave the entry out."))
            continue
        if getattr(implementation, "accelerator", False) and not accelerator:
            reason = f"{name!r} needs an accelerator, and this run is on CPUs."
            problems.append(Problem(key, reason, "Leave the entry out: ours has a path for CPUs."))
        elif idle := _idle(operation, config.kernels.layers, accelerator):
            problems.append(Problem(key, *idle))
    return problems


def _idle(operation: str, layers_when: str, accelerator: bool) -> tuple[str, str] | None:
    """(why no part of the run would call the operation, remedy)."""
    if operation in FOR_CODE:
        return f"no part of a run calls {operation!r}.", f"Call partita_kernels.replace({operation!r}, ...) in code that does."
    off = layers_when == "never" or (layers_when == layers.AUTO and not accelerator)
    if (off and operation in OF_LAYERS) or (layers_when == "never" and operation in OF_LAYERS_BUT_EXPERTS):
        reason = f"with kernels.layers={layers_when}{'' if accelerator else ' on CPUs'} nothing calls {operation!r}."
        return reason, "Set kernels.layers=always, or leave the entry out."
    return None


def use_kernels(config: Any, registry: Any) -> None:
    """Let this process use what the node asks for, and nothing that an earlier run asked for."""
    layers.choose(config.kernels.layers)
    tuning.choose(config.kernels.tiles)
    for operation in dispatch.OPERATIONS.values():
        operation.replacement = None
    for name, implementation in config.kernels.replace.items():
        partita_kernels.replace(name, find(name, implementation, registry))


def find(operation: str, name: str, registry: Any) -> Implementation:
    """The implementation that a name of slot `kernel` has for an operation. Raises PartitaError."""
    dispatch.load_all()
    if operation not in dispatch.OPERATIONS:
        raise ConfigError(f"there is no operation {operation!r}\n    -> {did_you_mean(operation, dispatch.OPERATIONS)}")
    implementation: Implementation = registry.provide("kernel", name)(operation)
    return implementation
