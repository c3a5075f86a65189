"""What the ranks of the tests of experts do: steps of a run as the command line plans it, and the layer alone against one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "parallel"), str(TESTS / "distributed")]

from layouts import spec_of
from pool import run_ranks

from partita.models.common import Mlp
from partita.models.llama import SwiGlu
from partita.plan.plan import Layout, Plan
from partita.runtime.functional import part
from partita.runtime.mesh import Mesh
from partita.state.parts import Part, declared
from partita.train.view import View
from partita_moe.change import _layer, share_experts
from partita_moe.dispatch import Exchange
from partita_moe.layer import MoeLayer
from partita_moe.packing import PACKINGS
from partita_moe.routing import EXPERT_CHOICE, SIGMOID, SOFTMAX_CHOSEN, Routing
from partita_parallel.tensor import cut_model

F64 = torch.float64
CUTS = (("experts", "inner"), ("dense.gate_up", "packed:13,13"), ("dense.up", "colwise"), ("dense.down", "rowwise"))


def train(folder: Path, *overrides: str, steps: int = 8, save: bool = False) -> list[dict[str, Any]]:
    """The metrics of the next updates of a run; in the end a checkpoint of it, if wanted."""
    spec = spec_of(folder, *overrides)
    return run_ranks(spec.ranks, steps_of, spec, steps, save, timeout=150)[0]


def steps_of(rank: int, world: int, spec: Any, steps: int, save: bool) -> list[dict[str, Any]]:
    """Body of a rank."""
    from partita.train.loop import StepClock, one_update
    from partita.train.resume import save as save_run
    from partita.train.run import open_run

    torch.set_num_threads(1)
    run = open_run(spec)
    lines, clock = [], StepClock()
    try:
        for step, batches in run.data.iterate(run.step + 1, run.step + steps):
            lines.append(one_update(run, step, batches, clock)[0])
            run.step = step
        if save:
            save_run(run)
            run.checkpoints.wait()
        return lines
    finally:
        run.data.close()
        run.checkpoints.close()
        run.metrics.close()


def column(lines: list[dict[str, Any]], name: str) -> list[Any]:
    """One value of each step."""
    return [line[name] for line in lines]


# ------------------------------------------------------------------ the layer alone


def double_layer(top_k: int, gate: str, shared: int, gelu: bool = False) -> MoeLayer:
    """Four experts with random weights in float64."""
    balance = "none" if gate == EXPERT_CHOICE else "sequence"
    dense = Mlp(10, 13, "tanh") if gelu else SwiGlu(10, 13)
    layer = _layer(dense, Routing(4, top_k, gate, shared=shared, balance=balance, aux_weight=0.0), None)
    generator = torch.Generator().manual_seed(5)
    for p in layer.parameters():
        nn.init.normal_(p, 0.0, 0.3, generator=generator)
    return layer.double()


def even_layer(top_k: int, width: int) -> MoeLayer:
    """Token i mod 4 goes to the `top_k` experts from i on: loads are even."""
    layer = _layer(SwiGlu(width, 8), Routing(4, top_k, SOFTMAX_CHOSEN, balance="none"), None)
    for p in layer.parameters():
        nn.init.normal_(p, 0.0, 0.1)
    with torch.no_grad():
        near = (torch.arange(4)[:, None] - torch.arange(4)[None, :]) % 4
        layer.router[:, :4] = -near.float()
    return layer


def whole_run(layout: Layout, rank: int, groups: dict[Any, Any] | None = None) -> Any:
    """As much of a run as an expert layer asks for. groups: that layouts of the same degrees share."""
    mesh = Mesh(layout, rank, torch.device("cpu"), {} if groups is None else groups)
    engine = SimpleNamespace(share=1.0, scaler=SimpleNamespace(value=1.0), recomputing=False)
    return SimpleNamespace(mesh=mesh, plan=Plan(layout=layout), engine=engine, view=View())


def compare_cut_layers(rank: int, world: int, lengths: list[int], tensor: int) -> dict[str, float]:
    """Largest differences of `compare_layer` for several layers, each with all tokens on each rank of a tensor group, and with parts of them."""
    groups: dict[Any, Any] = {}
    kinds = ((1, SIGMOID, 1), (2, SOFTMAX_CHOSEN, 0, True), (4, SOFTMAX_CHOSEN, 1, True))
    cases = [(kind, by_tokens) for kind in kinds for by_tokens in (False, True)] + [((2, EXPERT_CHOICE, 0), False)]
    return {
        f"{kind} {by_tokens} {what}": off
        for kind, by_tokens in cases
        for what, off in compare_layer(rank, world, kind, lengths, tensor, by_tokens, groups).items()
    }


def compare_layer(
    rank: int,
    world: int,
    kind: tuple[Any, ...],
    lengths: list[int],
    tensor: int = 1,
    sequence: bool = False,
    groups: dict[Any, Any] | None = None,
) -> dict[str, float]:
    """Largest differences of a layer whose experts are shared out from the same one on one rank, which sees all tokens.

    kind: arguments of `double_layer`. lengths: tokens of each data rank (one sequence each); some may have none. tensor: ranks that cut each
    expert, with all tokens of a data rank or, by `sequence`, an equal part of them.
    """
    torch.set_num_threads(1)
    alone, shared = double_layer(*kind), double_layer(*kind)
    width = alone.router_weight().shape[1]
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randn(1, n, width, dtype=F64, generator=generator) for n in lengths]
    seeds = [torch.randn(1, n, width, dtype=F64, generator=generator) for n in lengths]
    every = [t.clone().requires_grad_() for t in tokens]
    want = [alone(t) for t in every]
    torch.autograd.backward(want, seeds)
    ranks = world // tensor
    run = whole_run(Layout(shard=ranks, tensor=tensor, expert=ranks, sequence_parallel=sequence, styles=CUTS), rank, groups)
    place, group = run.mesh.coordinates["shard"], run.mesh.group(("tensor",))
    if tensor > 1:
        cut_model(shared, run.plan.layout, group)
    share_experts(shared, run)
    mine = (lambda x: part(x, group, 1)) if sequence else (lambda x: x)
    here = mine(tokens[place]).clone().requires_grad_()
    got = shared(here)
    got.backward(mine(seeds[place]))
    out = {
        "output": _apart(got, mine(want[place])),
        "gradient of tokens": _apart(here.grad, mine(every[place].grad)),
    }
    for (name, ours), true in zip(shared.named_parameters(), alone.parameters(), strict=True):
        grad, cut = ours.grad, declared(shared.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        assert grad is not None and true.grad is not None, name
        cut = cut or Part(tuple(true.shape))
        summed = tuple(a for a in ("shard", *cut.partial) if a not in cut.axes)
        if run.mesh.group(summed).size > 1:
            dist.all_reduce(grad, group=run.mesh.group(summed).process_group)
        out[name] = _apart(grad, cut.take(true.grad))
    return out


def _apart(a: Any, b: Any) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def bytes_on_the_wire(rank: int, world: int, top_k: int, width: int, tokens: int) -> int:
    """Bytes that this rank sends to others in forward and backward of a layer, of rows (the counts are a message of their own)."""
    sent = 0
    real = dist.all_to_all_single

    def counting(out: torch.Tensor, x: torch.Tensor, received: Any = None, splits: Any = None, **more: Any) -> Any:
        nonlocal sent
        if splits is not None:
            sent += sum(n for to, n in enumerate(splits) if to != rank) * x[0].nbytes
        return real(out, x, received, splits, **more)

    layer = even_layer(top_k, width)
    share_experts(layer, whole_run(Layout(shard=world, expert=world), rank))
    experts = layer.routing.experts
    x = torch.eye(experts, layer.router_weight().shape[1])[torch.arange(tokens) % experts].unsqueeze(0).requires_grad_()
    dist.all_to_all_single = counting
    try:
        layer(x).sum().backward()
    finally:
        dist.all_to_all_single = real
    return sent


# ------------------------------------------------------------------ what runs beside what


def beside_and_after(rank: int, world: int, formats: list[str]) -> dict[str, tuple[list[str], bool]]:
    """For each wire format: the order of messages and of the shared expert, forward and backward, and whether outputs and all gradients
    are to the bit those of a layer that computes the shared expert when all messages have arrived."""
    torch.set_num_threads(1)
    found = {}
    for format in formats:
        here, after = (_sending_layer(format, world, rank) for _ in range(2))
        after.companion = lambda flat: None  # type: ignore[method-assign]
        after.joined = lambda flat, routed, _, layer=after: routed + layer.dense(flat)  # type: ignore[method-assign, misc]
        x = torch.randn(2, 9 - 4 * rank, 10, generator=torch.Generator().manual_seed(rank))
        with _noted() as events:
            here.dense.register_forward_pre_hook(lambda *_: events.append("shared"))
            here.dense.register_full_backward_pre_hook(lambda *_: events.append("shared back"))
            one = _both_ways(here, x)
        two = _both_ways(after, x)
        found[format] = events, all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    return found


def _sending_layer(format: str, world: int, rank: int) -> Any:
    layer = double_layer(2, SOFTMAX_CHOSEN, 1).float()
    share_experts(layer, whole_run(Layout(shard=world, expert=world), rank))
    layer.packing = PACKINGS.get(format)
    return layer


def _both_ways(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in (x, *layer.parameters()) if p.grad is not None)]


@contextmanager
def _noted() -> Iterator[list[str]]:
    """When messages of rows set out and when they are waited for."""
    events: list[str] = []
    start, wait = Exchange.start, Exchange.wait

    def noted_start(self: Exchange, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        events.append("start")
        return start(self, x, back)

    def noted_wait(self: Exchange) -> None:
        events.append("wait")
        wait(self)

    Exchange.start, Exchange.wait = noted_start, noted_wait  # type: ignore[method-assign]
    try:
        yield events
    finally:
        Exchange.start, Exchange.wait = start, wait  # type: ignore[method-assign]
