"""Cuts a model into stages: what other ranks hold is taken out of the module tree, and each stage is a view of the tree that is left.

A stage runs the model's own forward. What stands before its blocks is replaced by stand-ins that produce activations of no width, and
its first block gets the activations that were received in their place; what stands after its blocks passes them through. So masks and
rotary angles are made by the model's own code on every stage, and no model has to know that it is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import PartitaError
from partita.plan.activations import Alike
from partita.plan.model_spec import inspect_model
from partita.plan.plan import Layout, Plan
from partita.plan.stages import Anatomy, Holders, hidden_tensor, last_stage, meta_inputs, stage_units, stages_of, study
from partita.state.layout import dtype_of
from partita.state.units import Stages, bind_parameters, find_units

SIMPLE = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Cut:
    """How a model was cut: attribute `partita_cut` of what is left of it. blocks: names of the blocks of each stage. width: of what
    stands in for activations."""

    anatomy: Anatomy
    blocks: tuple[tuple[str, ...], ...]
    width: int = 0


class Absent(nn.Module):
    """Stands where a module was that another stage holds.

    For integers (token ids, positions) it returns activations [..., width] that nobody reads; activations pass through unchanged.
    Simple attributes are the module's own, for forwards that ask a block what kind it is.
    """

    def __init__(self, stood_here: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.partita_width, self.partita_dtype = width, dtype
        known = {k: v for k, v in vars(stood_here).items() if isinstance(v, SIMPLE) and not k.startswith("_")}
        vars(self).update({k: v for k, v in known.items() if k not in vars(self)})

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The first tensor that is given, or activations without memory."""
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        return x if x.is_floating_point() else x.new_zeros((), dtype=self.partita_dtype).expand(*x.shape, self.partita_width)


class Gate(nn.Module):
    """A block at an end of a stage: `enter` replaces what comes in, where it is set; what goes out is kept in `left`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.enter: torch.Tensor | None = None
        self.left: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if self.enter is not None:
            if args:
                args = (self.enter, *args[1:])
            else:
                first = next(k for k, v in kwargs.items() if isinstance(v, torch.Tensor))
                kwargs[first] = self.enter
        out = self.block(*args, **kwargs)
        self.left = hidden_tensor(out)
        return out


class Stage:
    """One stage as a function of a batch and the activations of the stage before."""

    def __init__(self, view: nn.Module, first: Gate, last: Gate, is_last: bool) -> None:
        self._view, self._first, self._last, self._is_last = view, first, last, is_last

    def mode(self, training: bool) -> None:
        """Training or evaluation mode."""
        if self._view.training is not training:
            self._view.train(training)

    def __call__(self, x: torch.Tensor | None, inputs: dict[str, Any]) -> torch.Tensor:
        """x [B, T, C]: activations (None on the first stage); inputs: of the model. Returns activations, or logits on the last."""
        self._first.enter = x
        try:
            out = self._view(**inputs)
            left = self._last.left
        finally:
            self._first.enter = self._first.left = self._last.left = None
        assert left is not None
        result: torch.Tensor = out if self._is_last else left
        return result


def try_stages(model: nn.Module, anatomy: Anatomy, layout: Layout, blocks: Sequence[Sequence[str]]) -> tuple[int, str]:
    """(width of stand-ins, why the model on the meta device can't run in these stages, if it can't). Each stage is run on two tokens.

    Without width the model's own work on stand-ins costs nothing; some models take sizes from it, which then must be the true ones.
    """
    reason = ""
    for inputs in meta_inputs(model):
        width, tried = 0, set()
        while width not in tried:
            tried.add(width)
            reason, found = _try(model, Cut(anatomy, tuple(map(tuple, blocks)), width), layout, inputs)
            if not reason:
                return width, ""
            width = found or width
    return 0, reason


def _try(model: nn.Module, cut: Cut, layout: Layout, inputs: dict[str, torch.Tensor]) -> tuple[str, int]:
    """(why a stage fails, width of the activations). Stages at the ends are tried; those between are like the second."""
    x: torch.Tensor | None = None
    last = last_stage(layout)
    for number in sorted({0, min(1, last), last}):
        try:
            with torch.no_grad(), Alike(model, list(cut.blocks[number]), run=1):
                x = make_stage(model, cut, layout, number, torch.float32)(x, inputs)
        except Exception as error:  # any model may fail in its own way
            reason = f"stage {number} does not run on its own: {type(error).__name__}: {str(error).splitlines()[:1]}"
            return reason, 0 if x is None else x.shape[-1]
    return "", 0


def copies_problem(model: Any, layout: Layout, blocks: Sequence[Sequence[str]], anatomy: Anatomy) -> str:
    """Why tied parameters stand in the way, if they do. model: anything with `.parameters` of name and aliases."""
    holders = Holders(layout, blocks, anatomy)
    for p in model.parameters:
        ranks = holders((p.name, *p.aliases))
        if len(ranks) > 2:
            return f"{p.name} is tied over {len(ranks)} ranks of the pipeline, and a copy can be on two"
    return ""


def make_stage(model: nn.Module, cut: Cut, layout: Layout, number: int, dtype: torch.dtype) -> Stage:
    """A view of `model` that runs stage `number`. It shares all modules that it runs with the model. dtype: of activations."""
    anatomy, blocks = cut.anatomy, cut.blocks
    mine, last = list(blocks[number]), number == last_stage(layout)
    changes: dict[str, Callable[[nn.Module], nn.Module]] = {}

    def absent(module: nn.Module) -> nn.Module:
        return module if isinstance(module, Absent) else Absent(module, cut.width, dtype)

    if number:
        changes |= dict.fromkeys((n for n in anatomy.before if not (last and n in anatomy.after)), absent)
    if not last:
        changes |= dict.fromkeys((n for n in anatomy.after if not (number == 0 and n in anatomy.before)), absent)
    changes |= {name: absent for stage in blocks for name in stage if name not in mine}
    gates: dict[str, Gate] = {name: Gate(model.get_submodule(name)) for name in {mine[0], mine[-1]}}
    changes |= {name: _always(gate) for name, gate in gates.items()}
    view = _replaced(model, changes)
    return Stage(view, gates[mine[0]], gates[mine[-1]], last)


def _always(module: nn.Module) -> Callable[[nn.Module], nn.Module]:
    return lambda _: module


def _replaced(module: nn.Module, changes: dict[str, Callable[[nn.Module], nn.Module]], prefix: str = "") -> nn.Module:
    """A copy of the module tree as far as something in it changes; all else is shared."""
    if prefix and prefix[:-1] in changes:
        return changes[prefix[:-1]](module)
    if not any(name.startswith(prefix) for name in changes):
        return module
    clone = copy.copy(module)
    clone._modules = {
        key: child if child is None else _replaced(child, changes, f"{prefix}{key}.") for key, child in module._modules.items()
    }
    return clone


def split(model: nn.Module, plan: Plan, rank: int) -> nn.Module:
    """Take what rank `rank` of the pipeline does not hold out of the model on the meta device, in place.

    The module that is left has `partita_stages` and `partita_cut`. Raises PartitaError where the model can't be cut.
    """
    layout = plan.layout
    blocks = stage_units(inspect_model(model), layout)
    anatomy = study(model)
    if anatomy.reason:
        raise PartitaError(f"{type(model).__name__} can't be cut into stages: {anatomy.reason}")
    width, reason = try_stages(model, anatomy, layout, blocks)
    if reason:
        raise PartitaError(f"{type(model).__name__} can't be cut into stages: {reason}")
    bindings = bind_parameters(model)
    holders = Holders(layout, blocks, anatomy)
    where = {b.name: holders((b.name, *b.aliases)) for b in bindings}
    stages = stages_of(layout, rank)
    names = {alias: b.name for b in bindings for alias in b.aliases}
    shared = {name: ranks for name, ranks in where.items() if len(ranks) > 1 and rank in ranks}
    mine = tuple(tuple(blocks[s]) for s in stages)
    keep = {name for stage in mine for name in stage}
    if 0 in stages:
        keep |= {*anatomy.before, *anatomy.idle}
    if last_stage(layout) in stages:
        keep |= set(anatomy.after)
    gone = [n for n in (*anatomy.before, *anatomy.after, *anatomy.idle, *(n for n, _ in find_units(model))) if n not in keep]
    cut = Cut(anatomy, tuple(map(tuple, blocks)), width)
    _take_out(model, gone, width, dtype_of(plan.precision.compute))
    left = {name for name, _ in model.named_buffers()}
    buffers = frozenset(n for n in left if rank == 0 or any(n.startswith(f"{k}.") for k in keep))
    model.partita_stages = Stages(mine, names, shared, buffers)  # type: ignore[assignment]
    model.partita_cut = cut  # type: ignore[assignment]
    return model


def _take_out(model: nn.Module, gone: Sequence[str], width: int, dtype: torch.dtype) -> None:
    for name in dict.fromkeys(gone):
        parent, _, key = name.rpartition(".")
        try:
            holder = model.get_submodule(parent)
        except AttributeError:
            continue  # it went with a module that held it
        if key in holder._modules:
            holder._modules[key] = Absent(holder._modules[key], width, dtype)  # type: ignore[arg-type]
