"""The transform `tensor_parallel`: cuts the matrices of a model as its styles say, and gives them the communication that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partita.plan.plan import Layout
from partita.plan.styles import AXIS, TERMS, Cut, Style, cut_of, model_styles, styled_modules, transposed
from partita.runtime.functional import all_reduce, copy, gather, gather_last, part, reduce, reduce_scatter
from partita.runtime.mesh import Group
from partita.state.parts import Part, declare, declared
from partita.train.loss import token_cross_entropy
from partita.train.view import Loss
from partita_kernels import vocab_parallel_cross_entropy
from partita_parallel.linear import column_linear, row_linear

Tensor = torch.Tensor
Forward = Callable[..., Any]


@dataclass
class Shared:
    """What all modules of one model have in common. Changed for generation only.

    sequence: activations between matrices are cut by tokens. whole: logits are gathered. head: (first token, tokens in all) of this
    rank's logits, where the model's are cut.
    """

    group: Group
    sequence: bool = False
    whole: bool = False
    head: tuple[int, int] | None = None

    @contextmanager
    def wholly(self) -> Iterator[None]:
        """Inside, the model gives whole logits for sequences of any length."""
        before = self.sequence, self.whole
        self.sequence, self.whole = False, True
        try:
            yield
        finally:
            self.sequence, self.whole = before

    def loss(self, loss: Loss) -> Loss:
        """A loss for logits as they are: cut where we know how to, else gathered."""
        if self.head is None:
            return loss
        first, vocab = self.head
        sizes = _sizes(vocab, self.group.size)
        if loss is not token_cross_entropy:
            return lambda logits, labels, **options: loss(gather_last(logits, self.group, sizes), labels, **options)
        return partial(
            vocab_parallel_cross_entropy,
            offset=first,
            classes=vocab,
            reduce_max=partial(all_reduce, group=self.group, op=dist.ReduceOp.MAX),
            reduce_sum=partial(all_reduce, group=self.group),
        )


def cut_model(model: nn.Module, layout: Layout, group: Group) -> Shared:
    """Cut a model in place, on meta or not. Names of parameters stay. Returns what its parts share."""
    shared = Shared(group, layout.sequence_parallel)
    styled = [
        (module, style, {n: cut_of(module, n, style, layout.spread_kv) for n, p in module._parameters.items() if p is not None})
        for _, module, style in styled_modules(model, layout.styles or model_styles(model))
    ]
    sharer = _Sharer(model, group)
    for module, style, cuts in styled:
        forward = FORWARDS[style.name](module, style, cuts, shared) if "weight" in cuts else module.forward
        sharer.share(module, cuts, terms=layout.sequence_parallel or style.name in TERMS)
        module.forward = forward  # type: ignore[method-assign]
        _tell_sizes(module)
    if layout.sequence_parallel:
        done = {id(module) for module, _, _ in styled}
        for module in model.modules():
            if id(module) not in done:
                sharer.share(module, dict.fromkeys(module._parameters), terms=True)
        model.register_forward_pre_hook(lambda _m, args, kwargs: (args, _cut_noise(kwargs, shared)), with_kwargs=True)
    localize = getattr(model, "partita_localize", None)
    if localize is not None:
        localize(group.size)
    return shared


class _Sharer:
    """Replaces parameters by parts of them; tied ones stay tied, also where a module without a style holds them."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._group = group
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                self._holders.setdefault(id(parameter), []).append((module, name))

    def share(self, module: nn.Module, cuts: dict[str, Cut | None], terms: bool) -> None:
        """Cut and declare the parameters of a module. terms: ranks compute terms of the gradients of whole ones."""
        for name, cut in cuts.items():
            old = module._parameters[name]
            if old is None or declared(module, name) is not None:
                continue
            if cut is None:
                if terms:
                    declare(module, name, Part(tuple(old.shape), partial=AXIS))
                continue
            mine = cut.part(tuple(old.shape), self._group.rank, self._group.size)
            local = old.new_empty(mine.local) if old.is_meta else mine.take(old.detach()).clone()
            new = nn.Parameter(local, requires_grad=old.requires_grad)
            for holder, key in self._holders[id(old)]:
                holder._parameters[key] = new
                declare(holder, key, mine)


def _tell_sizes(module: nn.Module) -> None:
    """Sizes that modules print, and some forwards read."""
    weight = module._parameters.get("weight")
    if weight is None:
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]
    elif transposed(module):
        module.nx, module.nf = weight.shape  # type: ignore[assignment]


def _cut_noise(kwargs: dict[str, Any], shared: Shared) -> dict[str, Any]:
    """Dropout falls on this rank's tokens, and must draw for them what one rank would draw."""
    noise, ids = kwargs.get("noise"), kwargs.get("input_ids")
    if noise is None or not shared.sequence:
        return kwargs
    columns = noise.columns
    if columns is None:
        assert ids is not None
        columns = torch.arange(ids.shape[1], device=ids.device)
    return {**kwargs, "noise": replace(noise, columns=part(columns, shared.group, 0))}


# ------------------------------------------------------------------ what runs


def _matrix(module: nn.Module) -> Tensor:
    """The weight as [out, in]."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.t() if transposed(module) else weight


def _bias(module: nn.Module) -> Tensor | None:
    return module._parameters.get("bias")


def _colwise(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    cut, group = cuts["weight"], shared.group
    assert cut is not None
    thin = [b // cut.grain < group.size for b in cut.blocks] if cut.spread and cut.grain > 1 else []

    def run(x: Tensor) -> Tensor:
        y = column_linear(x, _matrix(module), _bias(module), group, sequence=shared.sequence)
        return _whole_heads(y, cut, thin, group) if any(thin) else y

    return run


def _whole_heads(y: Tensor, cut: Cut, thin: list[bool], group: Group) -> Tensor:
    """Heads that lie on several ranks, whole on each of them: first those of all ranks are gathered, then the own one is taken."""
    sizes = [hi - lo for lo, hi in cut.ranges(group.rank, group.size)]
    pieces = []
    for piece, block, is_thin in zip(y.split(sizes, -1), cut.blocks, thin, strict=True):
        if is_thin:
            head = group.rank * (block // cut.grain) // group.size
            piece = gather(piece, group, -1, summed=True).narrow(-1, head * cut.grain, cut.grain)
        pieces.append(piece)
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


def _rowwise(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    return lambda x: row_linear(x, _matrix(module), _bias(module), shared.group, sequence=shared.sequence)


def _rowwise_split(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    cut = cuts["weight"]
    assert cut is not None
    ((lo, hi),) = cut.ranges(shared.group.rank, shared.group.size)

    def run(x: Tensor) -> Tensor:
        mine = copy(x, shared.group)[..., lo:hi]
        return row_linear(mine, _matrix(module), _bias(module), shared.group, sequence=shared.sequence)

    return run


def _sizes(block: int, degree: int) -> tuple[int, ...]:
    return tuple(block * (i + 1) // degree - block * i // degree for i in range(degree))


def _colwise_gather(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    cut = cuts["weight"]
    assert cut is not None
    sizes = tuple(sum(hi - lo for lo, hi in cut.ranges(i, shared.group.size)) for i in range(shared.group.size))

    def run(x: Tensor) -> Tensor:
        y = column_linear(x, _matrix(module), _bias(module), shared.group, sequence=shared.sequence)
        return gather_last(y, shared.group, sizes)

    return run


def _head(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    cut = cuts["weight"]
    assert cut is not None
    (vocab,) = cut.blocks
    shared.head = (cut.ranges(shared.group.rank, shared.group.size)[0][0], vocab)
    sizes = _sizes(vocab, shared.group.size)

    def run(x: Tensor) -> Tensor:
        y = column_linear(x, _matrix(module), _bias(module), shared.group, sequence=shared.sequence)
        return gather_last(y, shared.group, sizes) if shared.whole else y

    return run


def _embedding(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    """A table of which this rank has some rows. What a subclass does to its output stays."""
    cut, forward = cuts["weight"], module.forward
    assert cut is not None
    ((first, last),) = cut.ranges(shared.group.rank, shared.group.size)
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        module.padding_idx = padding - first if first <= padding < last else None  # type: ignore[assignment]

    def run(ids: Tensor) -> Tensor:
        place = ids - first
        outside = (place < 0) | (place >= last - first)
        y = forward(place.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_scatter(y, shared.group, -2) if shared.sequence else reduce(y, shared.group)

    return run


def _position(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    """Each rank takes its tokens' rows; the gradient of the table is partial."""
    forward = module.forward

    def run(ids: Tensor) -> Tensor:
        y = forward(ids)
        return part(y, shared.group, -2) if shared.sequence else y

    return run


def _unchanged(module: nn.Module, style: Style, cuts: dict[str, Cut | None], shared: Shared) -> Forward:
    return module.forward


FORWARDS: dict[str, Callable[[nn.Module, Style, dict[str, Cut | None], Shared], Forward]] = {
    "colwise": _colwise,
    "packed": _colwise,
    "head": _head,
    "colwise_gather_output": _colwise_gather,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split,
    "embedding": _embedding,
    "position": _position,
    "partial": _unchanged,
    "inner": _unchanged,
    "replicate": _unchanged,
}


def tensor_parallel(model: nn.Module, run: Any) -> nn.Module:
    """See `partita.plugin.types.Transform`."""
    shared = cut_model(model, run.plan.layout, run.mesh.group(AXIS))
    run.view.losses.append(shared.loss)
    run.view.switches.append(shared.wholly)
    return model
