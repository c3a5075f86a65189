"""Shapes of the operators that nearly every model uses, so that a trace on meta does not wait for torch's compiler to be imported.

torch computes the results of many operators on meta in Python, and that code imports `torch._dynamo` and sympy when it first runs: more than
a second before each run, for nothing else. The rules here give the same shape, dtype and strides (tests compare them with torch's);
whatever has no rule, or an argument that a rule does not know, goes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Rule = Callable[..., Any]  # an operator's arguments -> its result, or None where the rule does not know


def _full(*tensors: torch.Tensor) -> tuple[int, ...] | None:
    """The shape that tensors broadcast to; None where they don't."""
    shape = [1] * max(t.ndim for t in tensors)
    for t in tensors:
        for i, n in enumerate(reversed(t.shape), start=1):
            if n != 1 and shape[-i] not in (1, n):
                return None
            shape[-i] = n if n != 1 else shape[-i]
    return tuple(shape)


def _floats(*values: Any) -> list[torch.Tensor] | None:
    """The tensors among values, where all of them are floating-point on meta and the others are numbers."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    known = all(type(v) in (int, float, torch.Tensor, torch.nn.Parameter) for v in values)
    return tensors if known and tensors and all(t.is_floating_point() and t.is_meta for t in tensors) else None


def _binary(a: Any, b: Any, *, alpha: Any = 1) -> torch.Tensor | None:
    tensors = _floats(a, b)
    shape = _full(*tensors) if tensors else None
    if tensors is None or shape is None:
        return None
    dtype = torch.result_type(a, b)
    first = tensors[0]
    if all(t.is_contiguous() for t in tensors):
        return first.new_empty(shape, dtype=dtype)
    return _dense(first, dtype) if tuple(first.shape) == shape else None


def _dense(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A result as large as x with axes in the order of x's strides; None where they don't tell it, so that other arguments have a say."""
    strides = x.stride()
    if 0 in strides or len(set(strides)) < x.ndim:
        return None
    dense, size = [0] * x.ndim, 1
    for axis in sorted(range(x.ndim), key=strides.__getitem__):
        dense[axis], size = size, size * x.shape[axis]
    return x.new_empty_strided(x.shape, dense, dtype=dtype)


def _unary(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor | None:
    if not _floats(x):
        return None
    return x.new_empty(x.shape) if x.is_contiguous() else _dense(x, x.dtype)


def _embedding(weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor | None:
    return weight.new_empty((*ids.shape, weight.shape[1])) if _floats(weight) and weight.ndim == 2 else None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    fits = _floats(a, b) and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    return a.new_empty((a.shape[0], b.shape[1])) if fits else None


def _product_and_bias(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: Any) -> torch.Tensor | None:
    out = _product(a, b)
    fits = out is not None and not scales and bias.dtype == a.dtype and _full(bias, out) == tuple(out.shape)
    return out if fits else None


def _layer_norm(x: torch.Tensor, shape: Sequence[int], *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if not _floats(x) or x.dtype is not torch.float32 or not x.is_contiguous():
        return None
    rows = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    return x.new_empty(x.shape), x.new_empty(rows), x.new_empty(rows)


def _mean(x: torch.Tensor, axes: Sequence[int] | None, keep: bool = False, **others: Any) -> torch.Tensor | None:
    if not _floats(x) or axes is None or len(axes) != 1 or others:
        return None
    axis = axes[0] % x.ndim
    return x.new_empty([1 if i == axis else n for i, n in enumerate(x.shape) if keep or i != axis])


def _channels_last(x: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.ndim in formats and not x.is_contiguous() and x.is_contiguous(memory_format=formats[x.ndim])


def _cat(tensors: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor | None:
    first = tensors[0]
    alike = _floats(*tensors) and all(t.dtype == first.dtype and t.ndim == first.ndim for t in tensors)
    if not alike or not first.ndim or any(_channels_last(t) for t in tensors):
        return None
    axis %= first.ndim
    rest = {tuple(n for i, n in enumerate(t.shape) if i != axis) for t in tensors}
    if len(rest) > 1:
        return None
    return first.new_empty([sum(t.shape[axis] for t in tensors) if i == axis else n for i, n in enumerate(first.shape)])


def _arange(*bounds: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor | None:
    if not all(isinstance(b, int) for b in bounds) or torch.device(device or "cpu").type != "meta":
        return None
    return torch.empty(len(range(*bounds)), dtype=dtype or torch.int64, device="meta")


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), _binary),
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.neg.default, aten.cos.default, aten.sin.default, aten.rsqrt.default), _unary),
    **dict.fromkeys((aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default, aten.relu.default), _unary),
    aten.pow.Scalar: lambda base, x: _unary(x) if isinstance(base, int | float) else None,
    aten.embedding.default: _embedding,
    aten.mm.default: _product,
    aten.addmm.default: _product_and_bias,
    aten.native_layer_norm.default: _layer_norm,
    aten.mean.dim: _mean,
    aten.cat.default: _cat,
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
}


class MetaRules(TorchDispatchMode):
    """While it is open, operators on meta that have a rule take it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to keep it away from this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        out = rule(*args, **(kwargs or {})) if rule else None
        return func(*args, **(kwargs or {})) if out is None else out
