"""Tensor parallel styles: how each matrix is cut over the axis `tensor` (Shoeybi et al. 2019, section 3), as plain words.

    colwise                 outputs are cut: columns of x W in the usual notation, rows of a weight [out, in]
    rowwise                 inputs are cut, and the outputs of all ranks are summed; a bias is added once, after that
    packed:64,32,32/16      like colwise, but each block of outputs is cut by itself (queries, keys, values; gate and up)
    embedding               tokens of a table are cut
    head                    outputs that are logits of tokens: they stay cut for the loss
    colwise_gather_output   like colwise, and every rank gets all outputs
    rowwise_split_input     like rowwise, from inputs that every rank has whole
    position                a whole table, whose output is cut like the activations where those are cut by tokens
    partial                 whole weights, of whose gradient each rank computes a term (norms on a rank's own heads)
    inner                   layers stacked in one module, cut through their inner channels: outputs of their first matrices, inputs of the
                            last. The module says where those are (`partita_inner`: parameter -> dimension and number of equal blocks);
                            what it doesn't name is whole, and each rank computes a term of its gradient
    replicate               whole weights on whole activations: what no style is given to

Small modules that stand beside a matrix (`partita_followers` of the module that holds it: path inside it -> `out` or `in`) are cut as it is:
one that shares its outputs like it where outputs are cut, one that shares its inputs where inputs are. No pattern is asked for them.

`/16` says that pieces of 16 belong together (the channels of a head): no cut goes through them. What runs is the business of
the plug-in that owns section `layout`; here is what planner, engine and checkpoint need: which part of each tensor a rank has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from partita.errors import did_you_mean
from partita.plan.plan import Layout
from partita.plan.problems import Problem
from partita.state.parts import Part, Range

if TYPE_CHECKING:
    from partita.plan.model_spec import ModelSpec, ParameterSpec

OUTPUT = ("colwise", "packed", "head", "colwise_gather_output")  # styles that cut outputs
INPUT = ("rowwise", "rowwise_split_input")
WHOLE = ("position", "partial", "replicate")
INNER = "inner"
TERMS = ("partial", INNER)  # ranks compute terms of the gradients of what these styles leave whole
CLOSING = (*INPUT, INNER)  # the terms of their outputs are summed over ranks
STYLES = (*OUTPUT, *INPUT, "embedding", INNER, *WHOLE)
AXIS = ("tensor",)
_STYLE = re.compile(r"(?P<name>[a-z_]+)(:(?P<blocks>\d+(,\d+)*))?(/(?P<grain>\d+))?\Z")


@dataclass(frozen=True)
class Style:
    """One style. blocks: sizes along the cut dimension that are cut by themselves (none: one block). grain: see the module."""

    name: str
    blocks: tuple[int, ...] = ()
    grain: int = 1


def parse_style(text: str) -> Style | None:
    """The style that a word means; None for a word that is no style."""
    found = _STYLE.match(text)
    if not found or found["name"] not in STYLES or (found["name"] == "packed") != bool(found["blocks"]):
        return None
    blocks = tuple(int(b) for b in found["blocks"].split(",")) if found["blocks"] else ()
    return Style(found["name"], blocks, int(found["grain"] or 1))


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut: `blocks` of dimension `dim`, in pieces of `grain`.

    spread: a block with fewer pieces than ranks may be cut through its pieces (the ranks then put them together again).
    """

    dim: int
    blocks: tuple[int, ...]
    grain: int = 1
    spread: bool = False

    def ranges(self, index: int, degree: int) -> tuple[Range, ...]:
        """The ranges of rank `index` of `degree`. Sizes of ranks differ by at most one grain, and the last rank's are the largest."""
        out, start = [], 0
        for block in self.blocks:
            grain = 1 if self.spread and block // self.grain < degree else self.grain
            pieces = block // grain
            out.append((start + pieces * index // degree * grain, start + pieces * (index + 1) // degree * grain))
            start += block
        return tuple(out)

    def part(self, shape: tuple[int, ...], index: int, degree: int) -> Part:
        """The part of a tensor of `shape` that rank `index` of `degree` has."""
        return Part(shape, self.dim, self.ranges(index, degree), AXIS)


def model_styles(module: nn.Module | None) -> tuple[tuple[str, str], ...]:
    """What a model declares of itself: `partita_tensor_plan()`, a mapping from patterns of module paths to styles. Empty: nothing."""
    declared = getattr(module, "partita_tensor_plan", None)
    plan: Mapping[str, str] = declared() if callable(declared) else {}
    return tuple(plan.items())


def styled_modules(module: nn.Module, styles: Iterable[tuple[str, str]]) -> Iterator[tuple[str, nn.Module, Style]]:
    """(path, module, style) of all modules that hold parameters and that a pattern fits; the first pattern that fits wins.

    Words that are no style count for nothing here: `style_problems` refuses them, and such a plan can still be shown.
    """
    rules = [(pattern, text, parse_style(text)) for pattern, text in styles]
    following: dict[int, Style | None] = {}
    for path, child in module.named_modules():
        if not any(p is not None for p in child._parameters.values()):
            continue
        if id(child) in following:
            style = following[id(child)]
        else:
            style = next((s for pattern, _, s in rules if fnmatchcase(path, pattern)), None)
            followers: Mapping[str, str] = getattr(child, "partita_followers", {})
            following |= {id(child.get_submodule(sub)): _follow(style, side) for sub, side in followers.items()}
        if style is not None:
            yield path, child, style


def _follow(style: Style | None, side: str) -> Style | None:
    """The style of what stands beside a module of that style; side: what it shares of the module, `out` or `in`."""
    if style is None or style.name == "partial":
        return style
    return style if style.name in (OUTPUT if side == "out" else INPUT) else None


def transposed(module: nn.Module) -> bool:
    """Whether a weight is [in, out]: transformers' Conv1D, which GPT-2 has."""
    return type(module).__name__ == "Conv1D"


def cut_of(module: nn.Module, attribute: str, style: Style, spread: bool = False) -> Cut | None:
    """How a style cuts one parameter of a module; None: not at all."""
    parameter = module._parameters[attribute]
    assert parameter is not None
    if style.name == INNER:
        dim, blocks = getattr(module, "partita_inner", {}).get(attribute, (0, 0))
        return Cut(dim, (parameter.shape[dim] // blocks,) * blocks) if blocks else None
    if style.name in WHOLE or (style.name in INPUT and parameter.ndim < 2):
        return None
    last = transposed(module) and parameter.ndim == 2
    dim = 1 if (style.name in INPUT) != last else 0
    return Cut(dim, style.blocks or (parameter.shape[dim],), style.grain, spread)


def local_parameters(model: ModelSpec, layout: Layout) -> tuple[ParameterSpec, ...]:
    """The parameters of the fullest rank along `tensor`, in the order of the model."""
    if layout.tensor == 1 or model.module is None:
        return model.parameters
    found = _known(model.module, layout.styles or model_styles(model.module), layout.spread_kv)
    return tuple(_local(p, found, layout) for p in model.parameters)


Found = dict[str, tuple[str, Cut | None]]  # parameter name -> its style, and how that cuts it
_cache: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Found]] = WeakKeyDictionary()


def _known(module: nn.Module, styles: tuple[tuple[str, str], ...], spread: bool) -> Found:
    """What the styles make of each parameter. Kept, since planning asks for many layouts of one model."""
    kept = _cache.setdefault(module, {})
    if (styles, spread) not in kept:
        kept[styles, spread] = {
            f"{path}.{attribute}" if path else attribute: (style.name, cut_of(child, attribute, style, spread))
            for path, child, style in styled_modules(module, styles)
            for attribute, parameter in child._parameters.items()
            if parameter is not None
        }
    return kept[styles, spread]


def _local(p: ParameterSpec, found: Found, layout: Layout) -> ParameterSpec:
    known = [found[n] for n in (p.name, *p.aliases) if n in found]
    cut = next((c for _, c in known if c is not None), None)
    if cut is not None:
        part = cut.part(p.shape, layout.tensor - 1, layout.tensor)
    else:
        partial = layout.sequence_parallel or any(style in TERMS for style, _ in known)
        part = Part(p.shape, partial=AXIS if partial else ())
    return replace(p, shape=part.local, part=part)


# ------------------------------------------------------------------ what can't be cut


def style_problems(module: nn.Module, layout: Layout, asked: Mapping[str, str]) -> list[Problem]:
    """Why a model can't be cut over `layout.tensor` ranks, with the legal values. asked: patterns that the user wrote."""
    problems = [_unknown(pattern, text) for pattern, text in layout.styles if parse_style(text) is None]
    if problems:
        return problems
    styled = list(styled_modules(module, layout.styles))
    problems += [_unused(module, pattern) for pattern in asked if not any(fnmatchcase(path, pattern) for path, _, _ in styled)]
    if not styled:
        reason = f"{type(module).__name__} declares no tensor plan."
        remedy = 'Set parallel.tensor=1, or give each matrix a style: parallel.styles=["layers.*.up=colwise", ...].'
        return [*problems, Problem("parallel.tensor", reason, remedy)]
    for path, child, style in styled:
        if (style.name == INNER) != hasattr(child, "partita_inner") and style.name not in WHOLE:
            return [*problems, _wrong_kind(path, child, style)]
        for attribute, parameter in child._parameters.items():
            cut = cut_of(child, attribute, style, layout.spread_kv) if parameter is not None else None
            if cut is not None and parameter is not None:
                if sum(cut.blocks) != parameter.shape[cut.dim]:
                    return [*problems, _wrong_blocks(path, style, parameter.shape[cut.dim])]
                found = _too_many(path, cut, layout)
                if found is not None:
                    return [*problems, found]
    return problems


def _unknown(pattern: str, text: str) -> Problem:
    name = re.split("[:/]", text)[0]
    remedy = "packed needs the sizes of its blocks: packed:64,32,32." if name == "packed" else did_you_mean(name, STYLES)
    return Problem("parallel.styles", f"{pattern!r} has style {text!r}, which is no style.", remedy)


def _unused(module: nn.Module, pattern: str) -> Problem:
    paths = [path for path, m in module.named_modules() if any(p is not None for p in m._parameters.values())]
    return Problem("parallel.styles", f"no module with weights fits {pattern!r}.", did_you_mean(pattern, paths))


def _wrong_kind(path: str, module: nn.Module, style: Style) -> Problem:
    stacks = hasattr(module, "partita_inner")
    reason = (
        f"{path!r} has style {style.name!r}, and {type(module).__name__} is {'a stack of' if stacks else 'no stack of'} layers."
    )
    return Problem("parallel.styles", reason, f"Use {'inner, or replicate' if stacks else 'colwise, rowwise or another style'}.")


def _wrong_blocks(path: str, style: Style, size: int) -> Problem:
    reason = f"{path!r} has {size} outputs, and its blocks {', '.join(map(str, style.blocks))} make {sum(style.blocks)}."
    return Problem("parallel.styles", reason, f"Give sizes that make {size}.")


def _too_many(path: str, cut: Cut, layout: Layout) -> Problem | None:
    """Heads must be shared evenly, and every rank needs something."""
    degree = layout.tensor
    for block in cut.blocks:
        pieces = block // cut.grain
        if cut.spread and pieces < degree:
            if block % degree or degree % pieces:
                return _indivisible(path, pieces, block, degree, "through heads")
        elif cut.grain > 1 and pieces % degree:
            return _indivisible(path, pieces, block, degree, "")
        elif pieces < degree:
            return Problem("parallel.tensor", f"{path!r} has {pieces} to share among {degree} ranks.", f"At most {pieces}.")
    return None


def _indivisible(path: str, pieces: int, block: int, degree: int, how: str) -> Problem:
    reason = f"the {pieces} heads of {path!r} can't be shared by {degree} ranks."
    legal = [d for d in range(1, pieces + 1) if pieces % d == 0]
    remedy = f"Legal values of parallel.tensor: {', '.join(map(str, legal))}"
    if pieces < degree and not how:
        remedy += "; more with parallel.replicate_kv=true"
    return Problem("parallel.tensor", reason, remedy + ".")
