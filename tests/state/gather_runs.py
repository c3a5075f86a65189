"""What the ranks of tests/state/test_gathers.py run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from cases import sgd
from engine_runs import make_plan
from torch import nn

from partita.runtime.mesh import Mesh
from partita.state.bucket import Bucket
from partita.state.engine import StateEngine
from partita.state.optimizers import make_sgd

BLOCKS, WIDTH = 5, 16
BLOCK, ROOT = 4 * (WIDTH * WIDTH + WIDTH), 4 * 2 * WIDTH  # bytes of weights
Path = Sequence[int]


class Wanderer(nn.Module):
    """Runs its blocks in the order of `path`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, path: Path) -> torch.Tensor:
        for i in path:
            x = x + torch.tanh(self.blocks[i](self.norm(x)))
        return x


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step * 100 + micro * 10 + rank))


def by_hand(paths: Sequence[Path], micro_batches: int, world: int) -> dict[str, torch.Tensor]:
    """Weights after a plain loop of SGD over the same batches."""
    model = Wanderer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, path in enumerate(paths):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            for rank in range(world):
                (model(batch(step, micro, rank), path).square().mean() / world / micro_batches).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@contextmanager
def watched(engine: StateEngine) -> Iterator[dict[str, int]]:
    """Counts gathers, and the largest bytes of weights that have memory at once (padding left out)."""
    seen = {"gathers": 0, "peak": 0}
    gather = Bucket.gather

    def counted(bucket: Bucket) -> None:
        sharded = not bucket.full.untyped_storage().size()
        gather(bucket)
        seen["gathers"] += sharded and bucket.full.untyped_storage().size() > 0
        whole = sum(4 * b.layout.numel for b in engine.buckets if b.full.untyped_storage().size())
        seen["peak"] = max(seen["peak"], whole)

    Bucket.gather = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Bucket.gather = gather  # type: ignore[method-assign]


def wander(
    rank: int,
    world: int,
    paths: Sequence[Path],
    micro_batches: int,
    prefetch: int,
    limit: int | None,
    looks: bool,
    placement: str = "parameters",
) -> Any:
    """Updates along `paths`, with an evaluation in between where it `looks`; of each (gathers, late ones, peak), and at the end the weights,
    and the order of reductions."""
    plan = replace(
        make_plan(world, placement, micro_batches=micro_batches), extensions={"prefetch": prefetch, "max_gathered": limit}
    )
    config = sgd()
    engine = StateEngine(Wanderer(), plan, Mesh(plan.layout, rank, torch.device("cpu")), config, make_sgd(config))
    engine.materialize()
    found = []
    for step, path in enumerate(paths):
        late = engine.gathers.late
        with watched(engine) as seen:
            engine.begin_step()
            for micro in range(micro_batches):
                out = engine.model(batch(step, micro, rank), path)
                if looks:
                    with torch.no_grad():
                        engine.model(out.detach(), path)
                engine.backward(out.square().mean() / world / micro_batches, last=micro == micro_batches - 1)
            norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
            engine.update(0.1, 0.0, norm)
        found.append((seen["gathers"], engine.gathers.late - late, seen["peak"]))
    weights = {b.name: engine.full_tensor(b.name) for b in engine.bindings}
    return found, weights, [unit.name for unit in engine.reductions.order]


def all_cases(rank: int, world: int, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`wander` for each of `cases`."""
    return [wander(rank, world, *case) for case in cases]
