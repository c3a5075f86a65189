"""The expert layer against plain ways to write one: seconds of forward and backward, and bytes on the wire against the formula.

    python scripts/bench/moe.py                              # 8 and 64 experts, on one core and on two ranks
    python scripts/bench/moe.py --experts 64 --width 512 --inner 256 --tokens 2048 --top-k 4

`loop`: a module for each expert, each asked in turn for the tokens that chose it. `transformers ...`: its Mixtral block with each way
that it has to run experts. All have the same weights and tokens and take turns (A B C A B C), one thread each, and an allocator that
keeps freed memory, as in a run; the figure is the median.
On two ranks ours shares out the experts (rows travel); the loop has all experts on each rank and sums their gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))

from partita.models.llama import SwiGlu  # noqa: E402
from partita.plan.plan import Layout, Plan  # noqa: E402
from partita.runtime.memory import keep_freed_memory  # noqa: E402
from partita.runtime.mesh import Mesh  # noqa: E402
from partita_moe.change import _layer, share_experts  # noqa: E402
from partita_moe.layer import MoeLayer  # noqa: E402
from partita_moe.routing import SOFTMAX_CHOSEN, Routing  # noqa: E402

Tensor = torch.Tensor
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")  # of transformers' experts
BATCHED_LIMIT = 1 << 30  # bytes that batched_mm's copies of weights may take


class Loop(nn.Module):
    """Experts as modules, one after the other."""

    def __init__(self, ours: MoeLayer) -> None:
        super().__init__()
        stacks: Any = ours.experts
        experts, width, double = stacks.gate_up.shape
        self.top_k = ours.routing.top_k
        self.router = nn.Parameter(ours.router.detach().clone())
        self.experts = nn.ModuleList(SwiGlu(width, double // 2) for _ in range(experts))
        with torch.no_grad():
            expert: Any
            for e, expert in enumerate(self.experts):
                expert.gate_up.weight.copy_(stacks.gate_up[e].t())
                expert.down.weight.copy_(stacks.down[e].t())

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        flat = x.view(-1, x.shape[-1])
        gates, chosen = F.linear(flat, self.router).softmax(-1).topk(self.top_k, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(chosen == e)
            if len(token):
                out.index_add_(0, token, expert(flat[token]) * gates[token, place, None])
        return out.view_as(x)


def our_layer(args: argparse.Namespace) -> MoeLayer:
    """The layer with random weights, the same on every rank."""
    layer = _layer(SwiGlu(args.width, args.inner), Routing(args.experts, args.top_k, SOFTMAX_CHOSEN, balance="none"), None)
    generator = torch.Generator().manual_seed(1)
    for p in layer.parameters():
        nn.init.normal_(p, 0.0, 0.05, generator=generator)
    return layer


def their_block(ours: MoeLayer, implementation: str) -> Any:
    """transformers' Mixtral block with the same weights."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    stacks: Any = ours.experts
    experts, width, double = stacks.gate_up.shape
    config = MixtralConfig(
        hidden_size=width, intermediate_size=double // 2, num_local_experts=experts, num_experts_per_tok=ours.routing.top_k
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(ours.router)
        block.experts.gate_up_proj.copy_(stacks.gate_up.transpose(1, 2))
        block.experts.down_proj.copy_(stacks.down.transpose(1, 2))
    return block


def turns(contenders: dict[str, Callable[[], Any]], count: int, barrier: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Median seconds of each, in turns; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(count + 1):
        for name, run in contenders.items():
            barrier()
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def step(layer: nn.Module, x: Tensor, seed: Tensor, after: Callable[[], Any] = lambda: None) -> Callable[[], Tensor]:
    """Forward and backward."""

    def run() -> Tensor:
        for p in layer.parameters():
            p.grad = None
        y: Tensor = layer(x)
        y.backward(seed)
        after()
        return y

    return run


def inputs(args: argparse.Namespace, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of a rank and the gradient of what the layer makes of them."""
    generator = torch.Generator().manual_seed(7 + rank)
    x, seed = (torch.randn(1, args.tokens, args.width, generator=generator) for _ in range(2))
    return x.requires_grad_(), seed


def one_core(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of each contender; raises AssertionError where they don't compute the same."""
    torch.set_num_threads(1)
    keep_freed_memory()
    ours, (x, seed) = our_layer(args), inputs(args)
    layers: dict[str, nn.Module] = {"ours": ours, "loop": Loop(ours)}
    for implementation in IMPLEMENTATIONS:
        copies = args.tokens * args.top_k * 2 * args.width * args.inner * 4
        if implementation != "batched_mm" or copies < BATCHED_LIMIT:
            layers[f"transformers {implementation}"] = their_block(ours, implementation)
    want = ours(x)
    for name, layer in layers.items():
        if not torch.allclose(layer(x), want, rtol=1e-4, atol=1e-5):
            raise AssertionError(f"{name} computes something else")
    return turns({name: step(layer, x, seed) for name, layer in layers.items()}, args.turns)


def two_ranks(rank: int, world: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds with experts shared out and with all experts everywhere, and the bytes of rows that ours sends in a step."""
    torch.set_num_threads(1)
    keep_freed_memory()
    ours, (x, seed) = our_layer(args), inputs(args, rank)
    loop = Loop(ours)
    layout = Layout(shard=world, expert=world)
    engine = SimpleNamespace(share=1.0, scaler=SimpleNamespace(value=1.0), recomputing=False)
    run = SimpleNamespace(mesh=Mesh(layout, rank, torch.device("cpu")), plan=Plan(layout), engine=engine)
    share_experts(ours, run)

    def summed() -> None:
        grads = [p.grad for p in loop.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)

    found = turns(
        {"ours": step(ours, x, seed, lambda: dist.all_reduce(ours.router.grad)), "loop": step(loop, x, seed, summed)},
        args.turns,
        dist.barrier,
    )
    return found | {"bytes": float(_bytes(ours, x, seed, rank))}


def _bytes(layer: MoeLayer, x: Tensor, seed: Tensor, rank: int) -> int:
    sent, network = 0, cast(Any, dist)
    real = network.all_to_all_single

    def counting(out: Tensor, rows: Tensor, received: Any = None, splits: Any = None, **more: Any) -> Any:
        nonlocal sent
        if splits is not None:
            sent += sum(n for to, n in enumerate(splits) if to != rank) * rows.shape[1] * rows.element_size()
        return real(out, rows, received, splits, **more)

    network.all_to_all_single = counting
    try:
        step(layer, x, seed)()
    finally:
        network.all_to_all_single = real
    return sent


def show(title: str, seconds: dict[str, float]) -> None:
    """A table with how many times as long as ours each takes."""
    print(title)
    for name, value in seconds.items():
        print(f"  {name:26s} {value * 1e3:9.2f} ms   {value / seconds['ours']:5.2f} x ours")


def main() -> int:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    import moe  # type: ignore[import-not-found]  # this file, by a name that ranks know it by
    from pool import run_ranks  # type: ignore[import-not-found]

    for experts in given.experts:
        args = argparse.Namespace(**{**vars(given), "experts": experts})
        what = f"{experts} experts, {args.top_k} of a token, {args.tokens} tokens of {args.width}, inner {args.inner}"
        show(f"one core: {what}", one_core(args))
        ranks = run_ranks(2, moe.two_ranks, args, timeout=600)
        show(f"two ranks: {what}", {name: max(r[name] for r in ranks) for name in ("ours", "loop")})
        formula = 4 * args.tokens * args.top_k * args.width * 4 * 1 // 2
        sent = [int(r["bytes"]) for r in ranks]
        print(f"  bytes of rows sent: {' and '.join(map(str, sent))}; 4 T k C bytes (e - 1) / e = {formula} with even loads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
