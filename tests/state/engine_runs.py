"""What the ranks of the engine tests run (module-level, so that worker processes can find it)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from reference import Model, batch, loss_sum

from partita.config.schema import OptimizerConfig
from partita.plan.plan import Layout, Placement, Plan, Precision, Schedule, Tier, Tiers
from partita.runtime.mesh import Mesh
from partita.state import bucket
from partita.state import engine as engine_module
from partita.state.engine import StateEngine
from partita.state.optimizers import make_adamw, make_sgd
from partita.state.tiers import TierRequest
from partita_offload.file import FileTier
from partita_offload.host import HostTier

PLACEMENTS = {
    "replicated": Placement(),
    "optimizer": Placement(optimizer=("shard",)),
    "gradients": Placement(gradients=("shard",), optimizer=("shard",)),
    "parameters": Placement(("shard",), ("shard",), ("shard",)),
}
BOTH = ("replicate", "shard")
NARROWER = {  # on a mesh of replicate 2
    "hpz": Placement(("shard",), BOTH, BOTH),
    "hfsdp": Placement(("shard",), ("shard",), BOTH),
    "gradients_in_group": Placement((), ("shard",), BOTH),
    "weights_in_group": Placement(("shard",), (), BOTH),
    "gradients_in_group_weights_everywhere": Placement(BOTH, ("shard",), BOTH),
    "everywhere": Placement(BOTH, BOTH, BOTH),
}
HERE = Tiers()
FP32 = Precision()
BF16 = Precision(compute="bfloat16", gradient="float32", reduce="float32", master="float32")


def make_plan(
    world: int, placement: str, micro_batches: int = 1, replicate: int = 1, precision: Precision = FP32, tiers: Tiers = HERE
) -> Plan:
    """A plan over `world` ranks."""
    layout = Layout(replicate=replicate, shard=world // replicate)
    return Plan(
        layout=layout,
        placement={**PLACEMENTS, **NARROWER}[placement],
        precision=precision,
        schedule=Schedule(micro_batches=micro_batches),
        tiers=tiers,
    )


def optimizer_config(rule: str) -> OptimizerConfig:
    """The settings of `reference.train`."""
    if rule == "sgd":
        return OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
    return OptimizerConfig(lr=1e-2)


def tiers_at(home: str, placement: str) -> Tiers:
    """All states in `home` (empty: on the device), as far as the placement lets them leave."""
    if not home:
        return HERE
    tier = Tier(home)
    path = os.environ.get("TMPDIR", "/tmp") if home == "file" else None
    return Tiers(tier if placement == "parameters" else Tier(), tier, tier, path=path)


def make_tiers(rank: int, tiers: Tiers) -> dict[str, Any]:
    """What a run makes for the places in `tiers`."""
    request = TierRequest(torch.device("cpu"), rank, tiers.path)
    places = {t.place for t in (tiers.parameters, tiers.gradients, tiers.optimizer)} - {"accelerator"}
    return {place: {"host": HostTier, "file": FileTier}[place](request) for place in sorted(places)}


def make_engine(rank: int, plan: Plan, rule: str, model: torch.nn.Module | None = None) -> StateEngine:
    """An engine over the odd model, or over `model`."""
    config = optimizer_config(rule)
    maker = make_sgd if rule == "sgd" else make_adamw
    mesh = Mesh(plan.layout, rank, torch.device("cpu"))
    engine = StateEngine(model or Model(), plan, mesh, config, maker(config), tiers=make_tiers(rank, plan.tiers))
    engine.materialize()
    return engine


def step(engine: StateEngine, number: int, size: int, rank: int, lr: float, clip: float) -> tuple[float, float]:
    """One update; returns (loss, norm)."""
    world, parts = engine.plan.layout.world, engine.plan.schedule.micro_batches
    ids, labels = batch(number, size)
    total = int((labels != -100).sum())
    share = size // world
    mine = slice(rank * share, (rank + 1) * share)
    engine.begin_step()
    local = 0.0
    for i, (x, y) in enumerate(zip(ids[mine].chunk(parts), labels[mine].chunk(parts), strict=True)):
        loss = loss_sum(engine.model(x), y)
        local += loss.item()
        engine.backward(loss / total, last=i == parts - 1)
    norm, (loss_total,) = engine.finish_gradients(torch.tensor([local], dtype=torch.float64))
    engine.update(lr, clip, norm)
    return loss_total / total, norm


def run(rank: int, world: int, placement: str, rule: str, steps: int, size: int, clip: float, **plan: Any) -> Any:
    """Train; returns (losses, norms, whole weights)."""
    torch.set_num_threads(1)
    engine = make_engine(rank, make_plan(world, placement, **plan), rule)
    lr = optimizer_config(rule).lr
    out = [step(engine, n, size, rank, lr, clip) for n in range(steps)]
    weights = {b.name: engine.full_tensor(b.name) for b in engine.bindings}
    with engine.full_parameters():
        copies = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    return [o[0] for o in out], [o[1] for o in out], weights, copies


def run_alone(rank: int, world: int, placement: str, rule: str, steps: int, size: int, clip: float, micro: int) -> Any:
    """`run` on one rank as for a model so large that the norm is found while gradients arrive; and how often it was found otherwise."""
    counted: list[int] = []
    usual = bucket.squared_norm

    def counts(tensors: list[torch.Tensor]) -> torch.Tensor:
        counted.append(len(tensors))
        return usual(tensors)

    with mock.patch.object(engine_module, "WORTH_COMPILING", 0), mock.patch.object(bucket, "squared_norm", counts):
        return (*run(rank, world, placement, rule, steps, size, clip, micro_batches=micro), len(counted))


def scaled(precision: Precision, **changes: Any) -> Precision:
    """`precision` with changes."""
    return replace(precision, **changes)
