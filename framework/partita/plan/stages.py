"""How a model can be cut between its units: what runs before the first of them, what after the last, and what a rank of a pipeline holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from partita.plan.activations import Alike, model_inputs, tensors_in
from partita.plan.model_spec import ModelSpec, ParameterSpec
from partita.plan.plan import Layout
from partita.state.units import SHARED, find_units


@dataclass(frozen=True)
class Anatomy:
    """Where a model can be cut, found by running it on the meta device.

    units: the blocks, in the order in which forward meets them. before, after: modules that hold parameters of their own and run
    before the first and after the last block (a module may do both). idle: those that forward doesn't meet. reason: why the model
    can't be cut, else empty.
    """

    units: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    reason: str = ""


def study(model: nn.Module) -> Anatomy:
    """The anatomy of a model on the meta device. Its forward is run once, on two tokens."""
    units = find_units(model)
    if not units:
        return Anatomy(reason="it has no list of blocks")
    reason = ""
    for inputs in meta_inputs(model):
        watch = _Watch(model, dict(units))
        try:
            with watch, Alike(model, [name for name, _ in units], run=1), torch.no_grad():
                model(**inputs)
        except Exception as error:  # any model may fail on meta in its own way
            reason = f"it does not run on the meta device: {type(error).__name__}: {str(error).splitlines()[:1]}"
            continue
        return watch.anatomy()
    return Anatomy(reason=reason)


def meta_inputs(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Arguments to try a model with on the meta device, one sample of two tokens: token ids, and the same with documents.

    transformers looks into positions for packed samples, which meta doesn't allow, unless it is told by a mask.
    """
    plain = model_inputs(model, (1, 2))
    if "documents" not in signature(model.forward).parameters:
        return [plain]
    return [plain, {**plain, "documents": next(iter(plain.values()))}]


_KNOWN: WeakKeyDictionary[nn.Module, Anatomy] = WeakKeyDictionary()


def anatomy_of(model: ModelSpec) -> Anatomy:
    """The anatomy of a model that is being planned for; it is run once."""
    if model.module is None:
        return Anatomy(reason="there are sizes of it and no module")
    if model.module not in _KNOWN:
        _KNOWN[model.module] = study(model.module)
    return _KNOWN[model.module]


class _Watch:
    """Notes the order in which modules are called."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._model, self._units = model, units
        inside = {id(m) for unit in units.values() for m in unit.modules()}
        self._outer = {n: m for n, m in model.named_modules() if id(m) not in inside and m._parameters}
        self._calls: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Watch:
        for name, module in {**self._outer, **self._units}.items():
            self._handles.append(module.register_forward_pre_hook(lambda _m, _a, n=name: self._calls.append(n)))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def anatomy(self) -> Anatomy:
        """What was seen."""
        at = [i for i, name in enumerate(self._calls) if name in self._units]
        met = tuple(self._calls[i] for i in at)
        if met != tuple(self._units):
            return Anatomy(reason="its forward does not call each block once, in the order in which they are listed")
        over = [n for n, m in self._outer.items() if any(u.startswith(f"{n}.") or not n for u in self._units)]
        if over:
            names = [f"{over[0]}.{k}" if over[0] else k for k in self._outer[over[0]]._parameters]
            return Anatomy(reason=f"parameter {names[0]} belongs to a module around the blocks")
        between = [n for n in self._calls[at[0] : at[-1]] if n not in self._units]
        if between:
            return Anatomy(reason=f"{between[0]}, which has parameters, runs between blocks")
        before, after = tuple(dict.fromkeys(self._calls[: at[0]])), tuple(dict.fromkeys(self._calls[at[-1] + 1 :]))
        return Anatomy(met, before, after, tuple(n for n in self._outer if n not in before and n not in after))


def stage_units(model: ModelSpec, layout: Layout) -> list[list[str]]:
    """Names of the blocks of each stage."""
    cuts = [0, *layout.stage_cuts, len(model.units)]
    return [[u.name for u in model.units[lo:hi] if u.name != model.root] for lo, hi in pairwise(cuts)]


def stages_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Stages that a rank of the pipeline axis computes; without a pipeline the only one."""
    placed = layout.stage_ranks or tuple(range(layout.pipeline))
    return tuple(stage for stage, where in enumerate(placed) if where == rank)


def last_stage(layout: Layout) -> int:
    """Number of the stage that ends the model."""
    return max(len(layout.stage_ranks), layout.pipeline) - 1


class Holders:
    """Says which ranks of the pipeline axis hold a parameter."""

    def __init__(self, layout: Layout, blocks: Sequence[Sequence[str]], anatomy: Anatomy) -> None:
        self._stage = {unit: stage for stage, units in enumerate(blocks) for unit in units}
        self._placed = layout.stage_ranks or tuple(range(layout.pipeline))
        self._last, self._before, self._after = last_stage(layout), set(anatomy.before), set(anatomy.after)

    def __call__(self, names: Sequence[str]) -> tuple[int, ...]:
        """Of a parameter with these names (several where it is tied), in order."""
        found: set[int] = set()
        for name in names:
            path = name.rpartition(".")[0]
            inside = self._unit_stage(path)
            stages = [inside] if inside is not None else [self._last] if path in self._after else []
            if path in self._before or not stages:
                stages.append(0)
            found |= {self._placed[s] for s in stages}
        return tuple(sorted(found))

    def _unit_stage(self, path: str) -> int | None:
        """The stage of the unit that `path` is or lies in."""
        while path:
            if path in self._stage:
                return self._stage[path]
            path = path.rpartition(".")[0]
        return None


def rank_parameters(model: ModelSpec, layout: Layout, parameters: Sequence[ParameterSpec]) -> Iterator[tuple[ParameterSpec, ...]]:
    """Those of `parameters` that each rank of the pipeline axis holds. What several of them hold has a unit of its own.

    Where the model can't be run on meta, what is in no block is on the first stage.
    """
    if layout.pipeline == 1:
        yield tuple(parameters)
        return
    holders = Holders(layout, stage_units(model, layout), anatomy_of(model))
    where = {p.name: holders((p.name, *p.aliases)) for p in parameters}
    for rank in range(layout.pipeline):
        mine = (p for p in parameters if rank in where[p.name])
        yield tuple(replace(p, unit=SHARED + p.name) if len(where[p.name]) > 1 else p for p in mine)


def hidden_tensor(output: Any) -> torch.Tensor:
    """The stream of activations in what a block returns: the first tensor of it."""
    return next(iter(tensors_in(output)))
