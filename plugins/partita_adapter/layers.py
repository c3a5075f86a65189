"""What runs: a linear layer with adapters beside it. The layer stays the module that it was, so names and sharding stay, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partita.models.common import Linear
from partita.runtime.mesh import Group
from partita.runtime.traffic import sending_among
from partita.state.parts import declared
from partita.state.units import find_units
from partita_adapter.quantized import Quantized

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
        layer.partita_sizes = sizes(layer)
        layer.lora_A, layer.lora_B = nn.ModuleDict(), nn.ModuleDict()
        layer.lora_magnitude_vector = nn.ParameterDict()
        layer.partita_scales, layer.partita_adapter, layer.partita_quantized = {}, None, None
        # what is cut like the layer's own outputs or inputs, where those are (partita.plan.styles)
        layer.partita_followers = {"lora_magnitude_vector": "out"}
        adapt(layer)
    inner, outer = layer.partita_sizes
    weight = next(p for p in layer._parameters.values() if p is not None)
    with torch.device(weight.device):
        layer.lora_A[label] = Linear(inner, rank, bias=False, dtype=weight.dtype)
        layer.lora_B[label] = Linear(rank, outer, bias=False, dtype=weight.dtype)
        if dora:
            layer.lora_magnitude_vector[label] = nn.Parameter(torch.empty(outer, dtype=weight.dtype))
    layer.partita_scales[label] = factor
    layer.partita_followers |= {f"lora_A.{label}": "in", f"lora_B.{label}": "out"}


def quantize(layer: Any, format: str, dtype: torch.dtype) -> None:
    """Hold the layer's matrix in 8 or 4 bits from now on."""
    layer.partita_quantized = Quantized(layer, format, dtype, transposed(layer))
    adapt(layer, layer.partita_quantized)


def adapt(layer: Any, plain: Callable[..., torch.Tensor] | None = None, cut: Group | None = None) -> None:
    """Have a layer's forward add the adapter that is in use (`partita_adapter`; None: the base alone).

    plain: the layer's own product; default: what its forward is now. cut: ranks that share its inputs.
    """
    layer.forward = layer.partita_forward = _adapted(layer, plain or layer.forward, cut)


def adapt_again(model: nn.Module, group: Group) -> None:
    """Put adapters back where matrices have been cut over `group`, which replaced the forward that had them."""
    for layer in adapted_layers(model):
        if layer.forward is not layer.partita_forward:
            part = declared(layer, "weight")
            inputs = part is not None and bool(part.ranges) and part.dim == (0 if transposed(layer) else 1)
            adapt(layer, cut=group if inputs else None)


def _adapted(layer: Any, plain: Callable[..., torch.Tensor], cut: Group | None) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        label, y = layer.partita_adapter, plain(x)
        if label is None:
            return y
        low, high, factor = layer.lora_A[label], layer.lora_B[label], layer.partita_scales[label]
        y = y + factor * high(low(x))
        if label not in layer.lora_magnitude_vector:
            return y
        length = row_lengths(matrix_of(layer), low.weight, high.weight, factor, cut).to(x.dtype)
        stretch = layer.lora_magnitude_vector[label] / length
        # the bias, which is in y, is not stretched
        return y * stretch if layer.bias is None else y * stretch + layer.bias * (1 - stretch)

    return forward


def matrix_of(layer: Any) -> torch.Tensor:
    """The layer's matrix (or this rank's part of it) as [out, in]."""
    if layer.partita_quantized is not None:
        return layer.partita_quantized.matrix()
    return layer.weight.t() if transposed(layer) else layer.weight


def row_lengths(
    matrix: torch.Tensor, low: torch.Tensor, high: torch.Tensor, factor: float, cut: Group | None = None
) -> torch.Tensor:
    """Euclidean length of each row of W + s B A, float32 [out]; a constant for backward (Liu et al. 2024, section 4.3).

    cut: ranks that share the columns.
    """
    with torch.no_grad():
        whole = matrix.float() + factor * (high.float() @ low.float())
        if cut is None:
            return torch.linalg.vector_norm(whole, dim=1)
        squares = whole.square().sum(1)
        with sending_among(cut, squares, 2):
            dist.all_reduce(squares, group=cut.process_group)
        return squares.sqrt()


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
