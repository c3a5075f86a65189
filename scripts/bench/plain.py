"""The plain torch loop that `overhead.py` compares with: DDP, fused AdamW, clipping. Imports nothing of Partita but the model.

python scripts/bench/plain.py first      # prints the seconds from the start of the process to the end of the first update
"""

from __future__ import annotations

import os
import sys
import time

BORN = float(os.environ.get("BENCH_BORN", time.time()))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402


def make_batches(
    rank: int, world: int, batch: int, sequence: int, vocab: int, count: int = 8
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Seeded random tokens: (inputs, labels) of a rank for `count` updates, used in turn."""
    g = torch.Generator().manual_seed(rank)
    share = batch // world
    tokens = [torch.randint(vocab, (share, sequence + 1), generator=g) for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


class PlainLoop:
    """One update at a time of `model`, as a careful user would write it."""

    def __init__(self, model: torch.nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], micro_batches: int) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.model = torch.nn.parallel.DistributedDataParallel(model) if self.world > 1 else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.batches, self.micro_batches = batches, micro_batches

    def update(self, step: int) -> float:
        """One optimizer update; returns the mean loss of this rank."""
        x, y = self.batches[step % len(self.batches)]
        total = 0.0
        for i, (a, b) in enumerate(zip(x.chunk(self.micro_batches), y.chunk(self.micro_batches), strict=True)):
            last = i == self.micro_batches - 1
            if isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
                self.model.require_backward_grad_sync = last
            logits = self.model(a)
            loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), b.reshape(-1)) / self.micro_batches
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def first_update() -> None:
    """The whole way of a plain script from the command to the first update, on the ranks that the environment names."""
    from partita.models.gpt import make_gpt

    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    from types import SimpleNamespace

    config = SimpleNamespace(
        model=SimpleNamespace(
            name="gpt", layers=4, width=256, heads=8, kv_heads=None, ffn=None, context=None, tie_embeddings=True, dropout=0.0, init_std=0.02,
            options={}, vocab=259,
        ),
        data=SimpleNamespace(sequence=128),
    )  # fmt: skip
    model = make_gpt(config, 259)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loop = PlainLoop(model, make_batches(rank, world, 16, 128, 259), 1)
    loop.update(0)
    if rank == 0:
        print(f"FIRST {time.time() - BORN:.3f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__" and sys.argv[1:] == ["first"]:
    first_update()
