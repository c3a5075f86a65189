"""Trains under a limit on private memory a model whose optimizer states are three times as large; run in a process of its own.

python small_memory.py FOLDER: prints the limit, the states' bytes in files, and the losses.
"""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from engine_runs import BF16, make_plan, make_tiers

from partita.config.schema import OptimizerConfig
from partita.plan.plan import Tier, Tiers
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.optimizers import make_adamw
from partita.state.tiers import updater

WIDTH = 1024
ROOM = 96 << 20  # bytes above what the interpreter and its libraries take


def private() -> int:
    """Bytes of private memory that this process has asked for."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData"))
    return int(line.split()[1]) * 1024


def main(folder: str) -> None:
    """An update, and the loss before and after it."""
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)  # a stack counts as private memory whether used or not
    updater.EXTENT = 1 << 18
    warm = nn.Linear(64, 64)
    warm(torch.ones(2, 64)).sum().backward()
    limit = private() + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    layers = -(-3 * limit // (12 * WIDTH * WIDTH))  # 12 bytes of each weight: master and two moments
    with torch.device("meta"):
        model = Tower(layers)
    tiers = Tiers(Tier("file"), Tier("file"), Tier("file"), path=folder)
    plan = make_plan(1, "parameters", precision=BF16, tiers=tiers)
    config = OptimizerConfig(weight_decay=0.0)
    engine = StateEngine(
        model, plan, Mesh(plan.layout, 0, torch.device("cpu")), config, make_adamw(config), tiers=make_tiers(0, tiers)
    )
    generator = torch.Generator().manual_seed(0)
    engine.materialize(lambda _n, shape: torch.randn(shape, generator=generator, dtype=torch.bfloat16) * WIDTH**-0.5)
    x = torch.randn(2, WIDTH, generator=generator).bfloat16()
    engine.begin_step()
    loss = model(x).float().square().mean()
    engine.backward(loss, last=True)
    norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    engine.update(1e-3, 1.0, norm)
    with torch.no_grad():
        losses = [loss.item(), model(x).float().square().mean().item()]
    engine.settle()
    print(limit, engine.allocated("file")["optimizer"], *losses)
    engine.close()


class Tower(nn.Module):
    """Square matrices."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + 0.1 * torch.tanh(block(x))
        return x


if __name__ == "__main__":
    main(sys.argv[1])
