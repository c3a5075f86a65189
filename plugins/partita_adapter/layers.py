"""What runs: a linear layer with adapters beside it. The layer stays the module that it was, so names and sharding stay, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from partita.models.common import Linear
from partita.state.units import find_units

DEFAULT = "default"  # label of the adapter that is trained
ALL = "all-linear"
PIECES = ("lora_A", "lora_B", "lora_magnitude_vector")


def transposed(layer: nn.Module) -> bool:
    """Whether a layer stores its matrix as [in, out] (Conv1D of transformers' GPT-2)."""
    return type(layer).__name__ == "Conv1D"


def is_linear(module: nn.Module) -> bool:
    """Whether a module can have an adapter."""
    return isinstance(module, nn.Linear) or transposed(module)


def sizes(layer: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    rows, columns = layer.weight.shape  # type: ignore[misc, union-attr]
    return (int(rows), int(columns)) if transposed(layer) else (int(columns), int(rows))


def find_targets(model: nn.Module, patterns: list[str]) -> list[str]:
    """Names of the layers that get an adapter, in the order of the model."""
    units = [name for name, _ in find_units(model)]
    found = []
    for name, module in model.named_modules():
        if not is_linear(module) or _is_piece(name):
            continue
        inside = any(name.startswith(unit + ".") for unit in units)
        if any(inside if p == ALL else matches(name, p) for p in patterns):
            found.append(name)
    return found


def _is_piece(name: str) -> bool:
    return any(part in PIECES for part in name.split("."))


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name ends with `pattern` (in whole words), or fits it as a shell pattern."""
    return name == pattern or name.endswith("." + pattern) or fnmatchcase(name, pattern)


def scale(alpha: float, rank: int, rslora: bool) -> float:
    """The factor s on B A x."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def add(layer: Any, label: str, rank: int, factor: float, dora: bool) -> None:
    """Put an adapter beside a layer, without values where the layer stands on meta. The first one changes the layer's forward."""
    if not hasattr(layer, "partita_scales"):
        layer.lora_A, layer.lora_B = nn.ModuleDict(), nn.ModuleDict()
        layer.lora_magnitude_vector = nn.ParameterDict()
        layer.partita_scales, layer.partita_adapter = {}, None
        layer.forward = adapted(layer, layer.forward)
    inner, outer = sizes(layer)
    weight: torch.Tensor = layer.weight
    with torch.device(weight.device):
        layer.lora_A[label] = Linear(inner, rank, bias=False, dtype=weight.dtype)
        layer.lora_B[label] = Linear(rank, outer, bias=False, dtype=weight.dtype)
        if dora:
            layer.lora_magnitude_vector[label] = nn.Parameter(torch.empty(outer, dtype=weight.dtype))
    layer.partita_scales[label] = factor


def adapted(layer: Any, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The layer's forward with the adapter that is in use (`partita_adapter`; None: the base alone)."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        label = layer.partita_adapter
        if label is None:
            return plain(x)
        low, high, factor = layer.lora_A[label], layer.lora_B[label], layer.partita_scales[label]
        if label not in layer.lora_magnitude_vector:
            return plain(x) + factor * high(low(x))
        matrix = layer.weight.t() if transposed(layer) else layer.weight
        length = row_lengths(matrix, low.weight, high.weight, factor).to(x.dtype)
        y = F.linear(x, matrix) + factor * high(low(x))
        y = y * (layer.lora_magnitude_vector[label] / length)
        return y if layer.bias is None else y + layer.bias

    return forward


def row_lengths(matrix: torch.Tensor, low: torch.Tensor, high: torch.Tensor, factor: float) -> torch.Tensor:
    """Euclidean length of each row of W + s B A, float32 [out]; a constant for backward (Liu et al. 2024, section 4.3)."""
    with torch.no_grad():
        whole = matrix.float() + factor * (high.float() @ low.float())
        return torch.linalg.vector_norm(whole, dim=1)


def use(model: nn.Module, label: str | None) -> None:
    """Compute with the adapter of that label from now on; None: with the base alone."""
    for layer in adapted_layers(model):
        if label is not None and label not in layer.partita_scales:
            from partita.errors import PartitaError

            raise PartitaError(f"there is no adapter {label!r}; there are {', '.join(sorted(layer.partita_scales))}")
        layer.partita_adapter = label


def adapted_layers(model: nn.Module) -> Iterator[Any]:
    """All layers with adapters."""
    return (m for m in model.modules() if hasattr(m, "partita_scales"))


def merged(
    matrix: torch.Tensor, low: torch.Tensor, high: torch.Tensor, length: torch.Tensor | None, factor: float
) -> torch.Tensor:
    """The matrix [out, in] with an adapter worked in, in its own dtype; computed in float32."""
    whole = matrix.float() + factor * (high.float() @ low.float())
    if length is not None:
        whole = whole * (length.float() / torch.linalg.vector_norm(whole, dim=1)).unsqueeze(1)
    return whole.to(matrix.dtype)
