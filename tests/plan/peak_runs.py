"""What the ranks of tests/plan/test_peak.py run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from planning import Toy

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))

from engine_runs import make_tiers
from live import LiveTensors

from partita.config.schema import OptimizerConfig
from partita.plan.plan import Activations, Plan
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.optimizers import make_adamw
from partita_offload.activations import offload_activations
from partita_recompute.checkpoint import recompute


def peak(rank: int, world: int, plan: Plan, sizes: tuple[int, int, int, int], sequence: int) -> tuple[int, int]:
    """Largest bytes of live tensors over three updates: (on the device, on the host)."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model: Any = Toy(*sizes)
    if plan.activations != Activations():
        model = recompute(model, plan.activations)
    if plan.tiers.activations.place != "accelerator":
        model = offload_activations(model, plan.tiers.activations.fraction)
    tiers = make_tiers(rank, plan.tiers)
    host = _watch_host(tiers, model)
    config = OptimizerConfig()
    with LiveTensors() as live:
        host["live"] = live
        mesh = Mesh(plan.layout, rank, torch.device("cpu"))
        engine = StateEngine(model, plan, mesh, config, make_adamw(config), tiers=tiers)
        engine.materialize(lambda _n, shape: torch.full(shape, 0.01))
        live.peak = 0
        for step in range(3):
            engine.begin_step()
            g = torch.Generator().manual_seed(step)
            for i in range(plan.schedule.micro_batches):
                ids = torch.randint(sizes[3], (plan.schedule.micro_batch, sequence), generator=g)
                logits = engine.model(ids)
                loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="sum") / 1000
                del logits
                engine.backward(loss, last=i == plan.schedule.micro_batches - 1)
                del loss
            norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
            engine.update(1e-3, 1.0, norm)
            engine.settle()
    engine.close()
    return live.peak, host["bytes"]


def _watch_host(tiers: dict[str, Any], model: Any) -> dict[str, Any]:
    """Leave out of the count what lies on the host; says how much that is."""
    seen: dict[str, Any] = {"bytes": 0}
    for tier in tiers.values():
        allocate = tier.allocate

        def noted(numel: int, dtype: torch.dtype, allocate: Any = allocate) -> Any:
            store = allocate(numel, dtype)
            memory = store.on(torch.device("cpu"))
            if memory is not None:
                seen["live"].add(memory)
                seen["live"].leave_out(memory)
                seen["bytes"] += memory.nbytes
            return store

        tier.allocate = noted
    offloader = getattr(model, "partita_offloader", None)
    if offloader is not None:
        begin = offloader._begin

        def begun(device: torch.device) -> None:
            begin(device)
            take = offloader.buffers.take

            def taken(size: int) -> torch.Tensor:
                buffer = take(size)
                seen["live"].add(buffer)
                seen["live"].leave_out(buffer)
                return buffer

            offloader.buffers.take = taken

        offloader._begin = begun
    return seen
