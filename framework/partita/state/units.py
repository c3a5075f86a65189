"""Which parameters belong to which unit of a module, and under which names they are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from partita.errors import PartitaError
from partita.state.parts import Part, declared

ROOT = "root"  # unit of everything that is in no block
SMALL = 0.01  # of a Sequential's parameters: what is no unit of its own
SHARED = "shared:"  # begins the unit of a parameter of which another rank of the pipeline holds a copy; it has one for itself


@dataclass(frozen=True)
class Stages:
    """What a rank of a pipeline has of a model: attribute `partita_stages` of the module that is left.

    blocks: names of the blocks of each of its stages, in order. names: parameter as it is called here -> as the whole model calls
    it, where they differ. shared: parameters with copies -> ranks of the pipeline axis that hold one; the first one owns it.
    buffers: those that this rank saves.
    """

    blocks: tuple[tuple[str, ...], ...]
    names: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Binding:
    """One parameter: its first name, every (module, attribute) that holds it, its unit, the part of a global tensor that it is."""

    name: str
    parameter: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]
    aliases: tuple[str, ...]
    unit: str
    part: Part


def find_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The units of a model but the root, in order: `model.partita_units()` if it has that, else members of lists that are found.

    These are the members of its largest ModuleList, and of others that hold modules of the same class (encoder and decoder). Lists of
    experts are none: not every rank runs each. A model without lists is cut into the members of one Sequential.
    """
    stages: Stages | None = getattr(model, "partita_stages", None)
    if stages is not None:
        return [(name, model.get_submodule(name)) for stage in stages.blocks for name in stage]
    declared = getattr(model, "partita_units", None)
    if declared is not None:
        return list(declared())
    named = [(name, m) for name, m in model.named_modules() if "expert" not in name]
    lists = [(name, m) for name, m in named if isinstance(m, nn.ModuleList) and _numel(m)]
    if not lists:
        return _members_of_sequential(model, [(name, m) for name, m in named if isinstance(m, nn.Sequential)])
    _, best = max(lists, key=lambda item: (len(item[1]) > 1, _numel(item[1])))
    classes = {type(child) for child in best}
    chosen: dict[nn.Module, str] = {}  # a module that is in a list several times is one unit
    for name, found in lists:
        inside = any(name.startswith(f"{unit}.") for unit in chosen.values())
        if found is best or (not inside and classes & {type(child) for child in found}):
            for i, child in enumerate(found):
                chosen.setdefault(child, f"{name}.{i}" if name else str(i))
    return [(name, child) for child, name in chosen.items()]


def _members_of_sequential(model: nn.Module, found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Members of the Sequential that leaves least to be whole at once; small ones (norms, activations) stay with the root."""
    total = _numel(model)

    def at_once(item: tuple[str, nn.Module]) -> int:
        sizes = [_numel(child) for child in item[1].children()]
        return total - sum(sizes) + max(sizes, default=0)

    if not total or not found:
        return []
    name, best = min(found, key=at_once)
    least = _numel(best) * SMALL
    members = [(f"{name}.{key}" if name else key, child) for key, child in best.named_children() if _numel(child) > least]
    return members if len(members) > 1 else []


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def bind_parameters(model: nn.Module) -> list[Binding]:
    """All parameters, tied ones once. A parameter that units share belongs to the root; one that ranks share, to a unit of its own."""
    stages: Stages = getattr(model, "partita_stages", None) or Stages(())
    unit_of_module = {id(m): unit for unit, block in find_units(model) for m in block.modules()}
    found: dict[int, tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(parameter), (parameter, []))[1].append((full, module, attribute))
    bindings = []
    for parameter, uses in found.values():
        units = {unit_of_module.get(id(module), ROOT) for _, module, _ in uses}
        unit = units.pop() if len(units) == 1 else ROOT
        names = tuple(stages.names.get(name, name) for name, _, _ in uses)
        unit = SHARED + names[0] if names[0] in stages.shared else unit
        holders = tuple((m, a) for _, m, a in uses)
        bindings.append(Binding(names[0], parameter, holders, names[1:], unit, _part(names[0], parameter, holders)))
    return bindings


def _part(name: str, parameter: nn.Parameter, holders: tuple[tuple[nn.Module, str], ...]) -> Part:
    """What is declared of a parameter; nothing: it is the whole tensor."""
    shape = tuple(parameter.shape)
    found = {part for module, attribute in holders if (part := declared(module, attribute)) is not None} or {Part(shape)}
    part = found.pop()
    if found:
        raise PartitaError(f"{name!r} is tied, and its modules declare different parts of it: {part} and {found.pop()}")
    if part.local != shape:
        raise PartitaError(f"{name!r} has shape {shape}, and was declared to be a part of shape {part.local} ({part})")
    return part


class BoundSpec:
    """The parameters of a real module in the form that `partita.state.layout.build_layout` reads."""

    def __init__(self, bindings: list[Binding]) -> None:
        self.parameters = [_Parameter(b) for b in bindings]


class _Parameter:
    def __init__(self, binding: Binding) -> None:
        self.name, self.shape = binding.name, tuple(binding.parameter.shape)
        self.trainable, self.unit, self.part = binding.parameter.requires_grad, binding.unit, binding.part
