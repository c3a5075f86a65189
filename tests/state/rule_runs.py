"""What the ranks of test_rules.py run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from engine_runs import NARROWER, PLACEMENTS
from torch import nn

from partita.builtin import partita_provide
from partita.config.schema import OptimizerConfig, OptimizerGroup
from partita.plan.plan import Layout, Plan, Precision
from partita.runtime.mesh import Mesh
from partita.state.engine import StateEngine
from partita.state.optimizers import rule_names
from partita.state.slices import StateSlice

STEPS, SIZE = 6, 8


class Net(nn.Module):
    """Matrices, vectors, a scalar; odd sizes; two blocks and a rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 20)) for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(20, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x * self.gain)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of batch `step`."""
    g = torch.Generator().manual_seed(step)
    return torch.randint(11, (SIZE, 5), generator=g).chunk(world)[rank], torch.randint(7, (SIZE, 5), generator=g).chunk(world)[
        rank
    ]


def loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This rank's share of the mean over the whole batch."""
    return nn.functional.cross_entropy(model(ids).view(-1, 7), labels.reshape(-1), reduction="sum") / (SIZE * 5)


def config_of(name: str) -> OptimizerConfig:
    """The settings of a test; `bf16_` before a rule: with bfloat16 states."""
    rule = name.removeprefix("bf16_")
    special: dict[str, dict[str, Any]] = {
        "lion": {"betas": [0.9, 0.99]},
        "lamb": {"betas": [0.9, 0.999], "eps": 1e-6},
        "adagrad": {"eps": 1e-10},
        "muon": {
            "momentum": 0.95,
            "nesterov": True,
            "groups": [OptimizerGroup(["embed*"], optimizer="adamw"), OptimizerGroup(["*"], max_dims=1, optimizer="adamw")],
        },
    }
    return OptimizerConfig(name=rule, lr=1e-2, weight_decay=0.1, **special.get(rule, {}))


def make(rank: int, world: int, name: str, placement: str, replicate: int) -> StateEngine:
    """An engine over the net."""
    config = config_of(name)
    precision = Precision(optimizer="bfloat16" if name.startswith("bf16_") else "float32")
    plan = Plan(Layout(replicate=replicate, shard=world // replicate), placement={**PLACEMENTS, **NARROWER}[placement])
    plan = replace(plan, precision=precision)
    rule, *others = [partita_provide("optimizer", n)(config) for n in rule_names(config)]
    engine = StateEngine(Net(), plan, Mesh(plan.layout, rank, torch.device("cpu")), config, rule, more_rules=others)
    engine.materialize()
    return engine


def run(engine: StateEngine, rank: int, world: int, steps: range, lr: float) -> dict[str, torch.Tensor]:
    """Train; returns whole weights."""
    for step in steps:
        engine.begin_step()
        engine.backward(loss(engine.model, *batch(step, rank, world)), last=True)
        norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
        learns = [b.name for b in engine.bindings if b.parameter.requires_grad and step == steps[-1]]
        before = {name: engine.full_tensor(name, "gradient") for name in learns}
        engine.update(lr, 0.0, norm)
        for name, gradient in before.items():  # callers may look at them after an update
            torch.testing.assert_close(engine.full_tensor(name, "gradient"), gradient, rtol=1e-6, atol=0)
    return {b.name: engine.full_tensor(b.name) for b in engine.bindings}


def train(rank: int, world: int, name: str, placement: str, replicate: int) -> dict[str, torch.Tensor]:
    """All updates."""
    return run(make(rank, world, name, placement, replicate), rank, world, range(STEPS), config_of(name).lr)


def train_eagerly(*args: Any) -> dict[str, torch.Tensor]:
    """`train` without torch.compile, which takes a minute for a rule."""
    with torch.compiler.set_stance("force_eager"):
        return train(*args)


def first_half(rank: int, world: int, name: str, placement: str) -> list[StateSlice]:
    """Half the updates; returns what this rank saves."""
    engine = make(rank, world, name, placement, 1)
    run(engine, rank, world, range(STEPS // 2), config_of(name).lr)
    return [replace(s, data=s.data.clone()) for s in engine.save_slices()]


def second_half(rank: int, world: int, name: str, placement: str, saved: list[list[StateSlice]]) -> dict[str, torch.Tensor]:
    """The other half, from what other ranks saved."""
    engine = make(rank, world, name, placement, 1)
    whole: dict[str, torch.Tensor] = {}
    for s in (s for part in saved for s in part):
        count = torch.Size(s.shape).numel()
        whole.setdefault(s.key, torch.full((count,), 77).to(s.dtype))[s.lo : s.hi] = s.data
    for s in engine.load_slices():
        s.data.copy_(whole[s.key][s.lo : s.hi])
    engine.after_load()
    engine.updates = STEPS // 2
    return run(engine, rank, world, range(STEPS // 2, STEPS), config_of(name).lr)


def memory(rank: int, world: int, name: str, placement: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of states (planned, allocated)."""
    engine = make(rank, world, name, placement, 1)
    for unit in engine.units:
        unit.free()
    return engine.layout.bytes(), engine.allocated()


def fsdp2(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The same updates by torch's FSDP2 and SGD with momentum, which hides no scale."""
    from torch.distributed.fsdp import fully_shard

    net = Net()
    net.gain.requires_grad_(False)  # FSDP2 takes no scalar that is trained
    ignored = {net.gain}
    for block in net.blocks:
        fully_shard(block)
    sharded = fully_shard(net, ignored_params=ignored)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss(sharded, *batch(step, rank, world)) * world).backward()  # it averages over ranks
        optimizer.step()
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in net.named_parameters()}


def like_fsdp2(rank: int, world: int, placement: str) -> dict[str, torch.Tensor]:
    """The updates of `fsdp2` by the engine."""
    from partita.state.optimizers import make_sgd

    net, config = Net(), OptimizerConfig(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.0)
    net.gain.requires_grad_(False)
    plan = Plan(Layout(shard=world), placement=PLACEMENTS[placement])
    engine = StateEngine(net, plan, Mesh(plan.layout, rank, torch.device("cpu")), config, make_sgd(config))
    engine.materialize()
    return run(engine, rank, world, range(STEPS), 0.05)
