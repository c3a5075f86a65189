"""How deepspeed.tar.xz was made: python make_deepspeed.py OUT STAGE (needs deepspeed 0.19; 2 ranks on CPUs, over gloo)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn


class Tiny(nn.Module):
    """Frozen, tied and odd-sized parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([3.0, 4.0]))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        h = torch.tanh(self.body(torch.tanh(self.frozen(self.embed(x)))))
        return nn.functional.cross_entropy(self.head(h), y)


def main(rank: int, out: str, stage: int) -> None:
    """Three updates, a checkpoint, and the truth by DeepSpeed's own means."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(ranks, MASTER_PORT=str(29611 + stage), DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo")
    import deepspeed
    import deepspeed.comm.torch

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # needs a compiler
    torch.manual_seed(0)
    model = Tiny()
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    deepspeed.init_distributed(dist_backend="gloo")
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randint(7, (2,), generator=g)
        loss = engine(x, (x + 1) % 7)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(out, tag="global_step3")
    truth = gather(deepspeed, engine, stage)
    if rank == 0:
        from safetensors.torch import save_file

        save_file({k: v.contiguous() for k, v in truth.items()}, f"{out}/truth.safetensors")


def gather(deepspeed: Any, engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """Whole masters and moments."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    truth: dict[str, torch.Tensor] = {}
    for n, p in engine.module.named_parameters():
        if p.requires_grad:
            truth[n] = safe_get_full_fp32_param(p).clone()
            truth |= {f"{n}.{k}": safe_get_full_optimizer_state(p, k).clone() for k in ("exp_avg", "exp_avg_sq")}
        elif stage == 3:
            with deepspeed.zero.GatheredParameters(p):
                truth[n] = p.detach().float().clone()
        else:
            truth[n] = p.detach().float().clone()
    return truth


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    mp.spawn(main, (sys.argv[1], int(sys.argv[2])), nprocs=2)
