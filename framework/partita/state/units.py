"""Which parameters belong to which unit of a module, and under which names they are known."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from partita.errors import PartitaError
from partita.state.parts import Part, declared

ROOT = "root"  # unit of everything that is in no block


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
    """The units of a model but the root, in order: `model.partita_units()` if it has that, else the members of its largest ModuleList."""
    declared = getattr(model, "partita_units", None)
    if declared is not None:
        return list(declared())
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not lists:
        return []
    name, best = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return [(f"{name}.{i}" if name else str(i), child) for i, child in enumerate(best)]


def bind_parameters(model: nn.Module) -> list[Binding]:
    """All parameters, tied ones once. A parameter shared between units belongs to the root."""
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
        names = tuple(name for name, _, _ in uses)
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
