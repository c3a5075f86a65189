"""What a model keeps for backward, counted by running it on the meta device: no memory, no arithmetic, any nn.Module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita.plan.meta_rules import MetaRules
from partita.plan.operators import ATTENTION, keeps


@dataclass
class UnitActivations:
    """Bytes of one micro-batch.

    kept: what autograd saves in the unit. stream: the part of it in tensors as large as the unit's input. input: its tensor inputs.
    matched: the part of kept that lies in modules which are recomputed selectively. matched_input: what has to be kept to recompute
    those. largest: the largest tensor of kept, which in backward has a gradient as large. outputs: of operators whose outputs are kept by
    name; outputs_stream: the part of it in tensors as large as the unit's input; reused: the part of kept that is those outputs.
    tail: of the root, the part of kept that is saved after the first block has begun. rows, inner: the parts of kept that go into and come
    out of stacked layers (`partita_inner`), and that lie between their matrices; stacked: the part of both that is in matched.
    """

    kept: int = 0
    stream: int = 0
    input: int = 0
    matched: int = 0
    matched_input: int = 0
    largest: int = 0
    outputs: int = 0
    outputs_stream: int = 0
    reused: int = 0
    tail: int = 0
    rows: int = 0
    inner: int = 0
    stacked: int = 0


@dataclass
class Trace:
    """Activations by unit, and elements of the model's output (logits). reason: why there are none, where tracing failed."""

    units: dict[str, UnitActivations] = field(default_factory=dict)
    output_numel: int = 0
    reason: str = ""

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Unit -> a number that units with equal figures share: the planner asks for many plans of many blocks, most of them alike."""
        known: dict[Any, int] = {}
        return {name: known.setdefault(tuple(vars(unit).values()), len(known)) for name, unit in self.units.items()}


def larger(one: Trace, two: Trace, size: int) -> Trace:
    """The trace of `size` sequences from those of one and of two."""

    def at(first: int, second: int) -> int:
        return first + (second - first) * (size - 1)

    units = {
        name: UnitActivations(*(at(getattr(u, f.name), getattr(two.units[name], f.name)) for f in fields(u)))
        for name, u in one.units.items()
    }
    return Trace(units, at(one.output_numel, two.output_numel))


def trace_activations(
    module: nn.Module,
    units: Iterable[str],
    root: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    matched: Iterable[str] = (),
    operators: Sequence[str] = (),
) -> Trace:
    """Run one forward pass on meta with token ids of `shape` (batch, sequence), and count what autograd saves.

    Each saved storage counts once, in the unit that saved it first; parameters and buffers don't count. Floating-point tensors
    count as `dtype`, in which the run will compute. A model that can't run on meta gives a Trace with a reason and no numbers.
    Of units that are alike two are run, and the second's numbers stand for the others. operators: see `partita.plan.operators`.
    """
    names = list(units)
    recorder = _Recorder(module, names, root, dtype, set(matched))
    outputs = _Outputs(recorder.output, operators) if operators else nullcontext()
    note = recorder.output if keeps(ATTENTION, operators) else None
    try:
        with MetaRules(), Alike(module, names) as stand, recorder, outputs, _FlashOnMeta(note):
            output = module(**model_inputs(module, shape))
        stand.copy(recorder.units)
    except Exception as error:  # any model may fail on meta in its own way; the estimate then says that it can't know
        return Trace(reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}")
    return Trace(recorder.units, sum(t.numel() for t in tensors_in(output) if t.ndim == 3))


def model_inputs(module: nn.Module, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    names = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    name = "input_ids" if "input_ids" in names else names[0]
    return {name: ids}


class _Flash(torch.autograd.Function):
    """Keeps what fused attention keeps on every device: q, k, v, the output and a float32 log-sum for each row and head."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,  # [B, H, T, D] each
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # fused kernels lay the output out as [B, T, H, D], so that joining the heads is no copy
        out = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1]).transpose(-3, -2)
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.mark_non_differentiable(sums)
        return out, sums


class _FlashOnMeta(TorchFunctionMode):
    """On meta torch takes the unfused attention, which would keep a [T, T] matrix for each head that no real run keeps.

    note: is told of the outputs.
    """

    def __init__(self, note: Callable[[torch.Tensor], None] | None) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = (*args, *(kwargs[n] for n in ("query", "key", "value")[len(args) :]))[:3]
        found = _Flash.apply(q, k, v)
        if self._note is not None:
            for tensor in found:
                self._note(tensor)
        return found[0]


class _Outputs(TorchDispatchMode):
    """Tells `note` of what operators give whose outputs are kept."""

    def __init__(self, note: Callable[[torch.Tensor], None], operators: Sequence[str]) -> None:
        super().__init__()
        self._note, self._operators = note, operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in MetaRules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if keeps(getattr(func, "overloadpacket", func).__name__, self._operators):
            for tensor in tensors_in(out):
                self._note(tensor)
        return out


class Alike:
    """While it is open, units with the same class and the same shapes of parameters return what the last of the first `run` returned.

    Of two that are run the first may keep more: what all units share (cosines of positions) counts where it is kept first.
    """

    def __init__(self, module: nn.Module, units: list[str], run: int = 2) -> None:
        met: dict[Any, list[str]] = {}
        self._like: dict[str, str] = {}  # unit -> the one that stands for it
        self._modules = {name: module.get_submodule(name) for name in units}
        for name, unit in self._modules.items():
            kind = (type(unit), unit.training, tuple((n, tuple(p.shape), p.requires_grad) for n, p in unit.named_parameters()))
            alike = met.setdefault(kind, [])
            alike.append(name)
            if len(alike) > run:
                self._like[name] = alike[run - 1]
        self._outputs: dict[str, Any] = {}
        self._handles: list[Any] = []
        self._own = {name: vars(self._modules[name]).get("forward") for name in self._like}  # forwards that were replaced before

    def __enter__(self) -> Alike:
        for name in set(self._like.values()):
            self._handles.append(self._modules[name].register_forward_hook(self._note(name)))
        for name, first in self._like.items():
            self._modules[name].forward = lambda *_, _first=first, **__: self._outputs[_first]  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for name, own in self._own.items():
            del self._modules[name].forward
            if own is not None:
                self._modules[name].forward = own

    def _note(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._outputs[name] = output

        return hook

    def copy(self, units: dict[str, UnitActivations]) -> None:
        """Give each unit the numbers of the one that stood for it."""
        for name, first in self._like.items():
            units[name] = replace(units[first])


class _Recorder:
    """Hooks on modules keep track of where forward is; a saved-tensor hook counts."""

    def __init__(self, module: nn.Module, units: list[str], root: str, dtype: torch.dtype, matched: set[str]) -> None:
        self.units: dict[str, UnitActivations] = {name: UnitActivations() for name in [root, *units]}
        self._module, self._names, self._matched, self._dtype = module, set(units), matched, dtype
        self._place: list[str] = [root]
        self._root, self._begun = root, False
        self._inside_match = 0
        self._inside_stack = False
        self._rows: set[int] = set()  # storages of what goes into and comes out of stacked layers
        self._alive: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
        self._storages = {t.untyped_storage()._cdata for t in self._alive}
        self._outputs: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> _Recorder:
        for name, m in self._module.named_modules():
            if name in self._names or name in self._matched:
                self._handles.append(m.register_forward_pre_hook(self._enter(name), with_kwargs=True))
                self._handles.append(m.register_forward_hook(self._leave(name), always_call=True))
            if hasattr(m, "partita_inner"):
                self._handles.append(m.register_forward_pre_hook(self._into_stack))
                self._handles.append(m.register_forward_hook(self._out_of_stack, always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        self._grad = torch.enable_grad()
        self._grad.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._grad.__exit__(*error)
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            size = sum(self._bytes(t) for t in tensors_in((args, kwargs)) if t.requires_grad)
            if name in self._names:
                self._begun = True
                self._place.append(name)
                self.units[name].input += size
            if name in self._matched:
                self._inside_match += 1
                self.units[self._place[-1]].matched_input += size

        return hook

    def _leave(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            if name in self._matched:
                self._inside_match -= 1
            if name in self._names:
                self._place.pop()

        return hook

    def _into_stack(self, _: nn.Module, args: Any) -> None:
        self._inside_stack = True
        self._rows |= {t.untyped_storage()._cdata for t in tensors_in(args)}

    def _out_of_stack(self, _: nn.Module, args: Any, output: Any) -> None:
        self._inside_stack = False
        self._rows |= {t.untyped_storage()._cdata for t in tensors_in(output)}
        self._alive += [t.detach() for t in tensors_in((args, output))]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages:
            self._storages.add(storage)
            self._alive.append(tensor.detach())  # holds the storage, so that its address isn't used again
            size = self._storage_bytes(tensor)
            unit = self.units[self._place[-1]]
            unit.kept += size
            if storage in self._rows or self._inside_stack:
                unit.rows += size if storage in self._rows else 0
                unit.inner += 0 if storage in self._rows else size
                unit.stacked += size if self._inside_match else 0
            else:
                unit.stream += size if size == unit.input else 0
            unit.matched += size if self._inside_match else 0
            unit.largest = max(unit.largest, size)
            unit.reused += size if storage in self._outputs else 0
            unit.tail += size if self._begun and self._place[-1] == self._root else 0
        return tensor

    def output(self, tensor: torch.Tensor) -> None:
        """An operator has given this, and a block under selective recompute would keep it."""
        if self._place[-1] not in self._names:
            return
        self._alive.append(tensor.detach())
        self._outputs.add(tensor.untyped_storage()._cdata)
        unit, size = self.units[self._place[-1]], self._storage_bytes(tensor)
        unit.outputs += size
        unit.outputs_stream += size if size == unit.input else 0

    def _storage_bytes(self, tensor: torch.Tensor) -> int:
        elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        return elements * (self._dtype.itemsize if tensor.dtype.is_floating_point else tensor.dtype.itemsize)

    def _bytes(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * (self._dtype.itemsize if tensor.dtype.is_floating_point else tensor.dtype.itemsize)


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """All tensors in nested containers and Hugging Face outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
