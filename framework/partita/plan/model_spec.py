"""What a plan needs to know of a model, read from any nn.Module on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn

from partita.state.parts import Part
from partita.state.units import ROOT, Binding, bind_parameters, find_units


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. aliases: further names of the same (tied) parameter. unit: the unit that owns it.

    part: of a global tensor, on one rank; None: `shape` is the whole one. experts: dimension 0 counts experts, which the expert
    axis shares out; a module says so of its parameters in `partita_experts`, a set of their names.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    unit: str
    aliases: tuple[str, ...] = ()
    part: Part | None = None
    experts: bool = False

    @property
    def numel(self) -> int:
        """Elements; 1 for a 0-d parameter, 0 for an empty one."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferSpec:
    """One buffer; every rank holds all of them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool

    @property
    def bytes(self) -> int:
        """Bytes of the whole buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class UnitSpec:
    """A block that is gathered, recomputed and placed as a whole. numel counts the parameters it owns."""

    name: str
    numel: int
    trainable: int


@dataclass(frozen=True)
class ModelSpec:
    """Parameters in the order of `named_parameters`, each once. module: the model on meta; used to trace activations."""

    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    units: tuple[UnitSpec, ...]
    root: str = ROOT
    module: Any = field(default=None, repr=False, compare=False)
    _matching: dict[tuple[str, ...], list[str]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def numel(self) -> int:
        """All parameters, tied ones once."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trainable(self) -> int:
        """Parameters that are trained."""
        return sum(p.numel for p in self.parameters if p.trainable)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the units but the root."""
        return tuple(u.name for u in self.units if u.name != self.root)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.bytes for b in self.buffers)

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of forward and backward for one token of a sequence of that length.

        The model's own count if any, else 6 for each weight of a matrix, attention left out (Kaplan et al. 2020, appendix B).
        """
        own = getattr(self.module, "flops_per_token", None)
        if callable(own):
            return float(own(sequence))
        embeddings = _embedding_names(self.module) if self.module is not None else set()
        matrices = (p.numel for p in self.parameters if len(p.shape) > 1 and not {p.name, *p.aliases} <= embeddings)
        return 6.0 * sum(matrices)

    def module_names(self) -> list[str]:
        """Names of the modules inside units, relative to their unit, each once."""
        return sorted({name for _, name in _inner_modules(self)})

    def matching_modules(self, patterns: tuple[str, ...]) -> list[str]:
        """Full names of the outermost modules inside units whose relative name, or last part of it, fits a shell pattern."""
        if patterns not in self._matching:
            self._matching[patterns] = self._find_matching(patterns)
        return list(self._matching[patterns])

    def _find_matching(self, patterns: tuple[str, ...]) -> list[str]:
        found: list[str] = []
        for unit, name in _inner_modules(self):
            full = f"{unit}.{name}"
            if any(full.startswith(f + ".") for f in found):
                continue
            if any(fnmatchcase(name, p) or fnmatchcase(name.rpartition(".")[2], p) for p in patterns):
                found.append(full)
        return found


def _inner_modules(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    if spec.module is None:
        return
    for unit in spec.blocks:
        for name, _ in spec.module.get_submodule(unit).named_modules():
            if name:
                yield unit, name


def _embedding_names(module: nn.Module) -> set[str]:
    return {f"{name}.weight" for name, m in module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def inspect_model(module: nn.Module) -> ModelSpec:
    """The spec of a module, on meta or not. Nothing is computed and no memory is touched.

    Units are those that the engine uses (partita.state.units). What lies outside (embeddings, last norm, head) is unit
    `root`, and so is a parameter that two units share.
    """
    units = [name for name, _ in find_units(module)]
    parameters = tuple(
        ParameterSpec(
            b.name, tuple(b.parameter.shape), b.parameter.dtype, b.parameter.requires_grad, b.unit, b.aliases, experts=_experts(b)
        )
        for b in bind_parameters(module)
    )
    return ModelSpec(parameters, tuple(_buffers(module)), _units(parameters, units), module=module)


def _experts(binding: Binding) -> bool:
    return any(attribute in getattr(module, "partita_experts", ()) for module, attribute in binding.holders)


def _buffers(module: nn.Module) -> Iterator[BufferSpec]:
    persistent = set(module.state_dict(keep_vars=True))
    for name, b in module.named_buffers():
        yield BufferSpec(name, tuple(b.shape), b.dtype, name in persistent)


def _units(parameters: tuple[ParameterSpec, ...], units: list[str]) -> tuple[UnitSpec, ...]:
    """Root first where it owns parameters (its embedding is used first), then the units in order."""
    total: dict[str, list[int]] = {name: [0, 0] for name in [ROOT, *units]}
    for p in parameters:
        unit = p.unit if p.unit in total else ROOT  # one that stages share stands in no block
        total[unit][0] += p.numel
        total[unit][1] += p.numel if p.trainable else 0
    return tuple(UnitSpec(name, n, t) for name, (n, t) in total.items() if name != ROOT or n)
