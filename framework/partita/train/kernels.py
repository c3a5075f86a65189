"""Config node `kernels`: which kernels a run uses. Libraries stand in slot `kernel` beside what plug-ins bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import partita_kernels
from partita.errors import ConfigError, PartitaError, did_you_mean
from partita.models import layers
from partita.plan.problems import Problem
from partita_kernels import dispatch, tuning

Implementation = Callable[..., Any]


def check_kernels(config: Any, registry: Any) -> list[Problem]:
    """What of the node can't be carried out."""
    problems = []
    if config.kernels.layers not in layers.WHEN:
        reason = f"{config.kernels.layers!r} says nothing."
        problems.append(Problem("kernels.layers", reason, f"Use one of {', '.join(layers.WHEN)}."))
    if config.kernels.tiles not in tuning.MODES:
        reason = f"{config.kernels.tiles!r} says nothing."
        problems.append(Problem("kernels.tiles", reason, f"Use one of {', '.join(tuning.MODES)}."))
    for operation, name in config.kernels.replace.items():
        try:
            find(operation, name, registry)
        except PartitaError as error:
            reason, _, remedy = str(error).partition("\n    -> ")
            problems.append(Problem(f"kernels.replace.{operation}", reason, remedy or "Leave the entry out."))
    return problems


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


def make_liger(operation: str) -> Implementation:
    """Slot `kernel`: SwiGLU and GeGLU of liger-kernel (Hsu et al. 2024), for accelerators."""
    ours: dict[str, Implementation] = {"glu": _liger_glu, "glu_backward": _liger_glu_backward}
    if operation not in ours:
        raise ConfigError(f"liger has no implementation of {operation!r}\n    -> It has {', '.join(ours)}.")
    try:
        import liger_kernel.ops  # noqa: F401
    except ImportError as error:
        raise ConfigError("liger-kernel isn't installed\n    -> pip install liger-kernel, or leave liger out.") from error
    return ours[operation]


def _liger_takes(x: torch.Tensor, kind: int) -> bool:
    """It has no exact GELU, and its kernels need an accelerator."""
    return kind in (0, 1) and x.device.type in dispatch.TRITON_DEVICES and x.dtype != torch.float64 and x.numel() > 0


def _liger_glu(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    if not _liger_takes(gate, kind):
        return _ours("glu", gate)(gate, up, kind)
    from liger_kernel.ops.geglu import geglu_forward
    from liger_kernel.ops.swiglu import swiglu_forward

    forward = swiglu_forward if kind == 0 else geglu_forward
    return forward(gate.contiguous(), up.contiguous())[2]


def _liger_glu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not _liger_takes(gate, kind):
        return _ours("glu_backward", gate)(dy, gate, up, kind)
    from liger_kernel.ops.geglu import geglu_backward
    from liger_kernel.ops.swiglu import swiglu_backward

    backward = swiglu_backward if kind == 0 else geglu_backward
    # It writes over gate and up, which others may still read.
    copies = (t.clone(memory_format=torch.contiguous_format) for t in (gate, up))
    return backward(*copies, dy.contiguous())


def _ours(operation: str, x: torch.Tensor) -> Implementation:
    own = dispatch.OPERATIONS[operation]
    return own.implementation(x.device)
