"""What the ranks of tests/state/test_cases.py run. Each case rebuilds one public failure report in a few lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from engine_runs import BF16, make_plan, make_tiers, tiers_at
from torch import nn

from partita.config.schema import OptimizerConfig, OptimizerGroup
from partita.plan.plan import Collectives, LossScale, Precision, Tiers, Wire
from partita.runtime.collectives import NativeCollectives
from partita.runtime.mesh import Mesh
from partita.state import engine as engine_module
from partita.state.engine import StateEngine
from partita.state.optimizers import make_adamw, make_sgd

OPEN: list[StateEngine] = []  # that nobody has closed yet


def engine_for(rank: int, world: int, placement: str, model: nn.Module, config: OptimizerConfig, **plan: Any) -> StateEngine:
    """An engine over `model` with the rule that `config` names."""
    made = make_plan(world, placement, **plan)
    rule = make_sgd(config) if config.name == "sgd" else make_adamw(config)
    mesh = Mesh(made.layout, rank, torch.device("cpu"))
    engine = StateEngine(model, made, mesh, config, rule, tiers=make_tiers(rank, made.tiers))
    engine.materialize()
    OPEN.append(engine)
    return engine


def sweep(rank: int, world: int, fn: Any, calls: list[tuple[Any, ...]]) -> list[Any]:
    """A case for each tuple of arguments."""
    out = []
    for arguments in calls:
        try:
            out.append(fn(rank, world, *arguments))
        except Exception as error:
            error.add_note(f"{fn.__name__}{arguments}")
            raise
        while OPEN:
            OPEN.pop().close()
    return out


def sgd(lr: float = 0.1, **changes: Any) -> OptimizerConfig:
    """Plain SGD, which hides no scale."""
    return OptimizerConfig(name="sgd", lr=lr, weight_decay=0.0, **changes)


class Scalars(nn.Module):
    """Named scalar weights; the loss of weight w with constant c is w * c."""

    def __init__(self, **weights: float) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(float(value))))

    def forward(self, *factors: float) -> torch.Tensor:
        return sum((p * c for p, c in zip(self.parameters(), factors, strict=True)), torch.zeros(()))


def update(engine: StateEngine, losses: list[torch.Tensor], lr: float, clip: float = 0.0) -> float:
    """One update from micro-batch losses that were already divided; returns the norm."""
    norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    engine.update(lr, clip, norm)
    return norm


def token_weights(rank: int, world: int, placement: str, tokens: list[list[tuple[int, float]]]) -> tuple[float, float]:
    """tokens[rank] = micro-batches of (count, c). Returns (w after one step from 1 with lr 0.1, gradient norm)."""
    mine = tokens[rank]
    total = sum(n for r in tokens for n, _ in r)
    engine = engine_for(rank, world, placement, Scalars(w=1.0), sgd(), micro_batches=len(mine))
    engine.begin_step()
    for i, (count, c) in enumerate(mine):
        engine.backward(engine.model(count * c) / total, last=i == len(mine) - 1)
    norm = update(engine, [], 0.1)
    return float(engine.full_tensor("w")), norm


def clip_report(rank: int, world: int, placement: str, home: str) -> tuple[float, list[float]]:
    """Gradients 30 and 40, clip 1, SGD lr 1: norm 50, moves 0.6 and 0.8."""
    engine = engine_for(rank, world, placement, Scalars(a=0.0, b=0.0), sgd(1.0), tiers=tiers_at(home, placement))
    engine.begin_step()
    engine.backward(engine.model(30.0, 40.0) / world, last=True)
    norm = update(engine, [], 1.0, clip=1.0)
    return norm, [float(engine.full_tensor(n)) for n in "ab"]


def group_rates(rank: int, world: int, placement: str, home: str) -> list[float]:
    """Two groups with their own rate; a third that matches nothing here."""
    config = sgd(1.0, groups=[OptimizerGroup(["a"], 1e-2), OptimizerGroup(["none*"], 5.0), OptimizerGroup(["b"], 1e-4)])
    engine = engine_for(rank, world, placement, Scalars(a=0.0, b=0.0), config, tiers=tiers_at(home, placement))
    engine.begin_step()
    engine.backward(engine.model(1.0, 1.0) / world, last=True)
    update(engine, [], 1.0)
    return [float(engine.full_tensor(n)) for n in "ab"]


def group_decay(rank: int, world: int, placement: str, home: str) -> list[float]:
    """AdamW, gradient 0, lr 0.1, decay 0.1 and 0."""
    config = OptimizerConfig(lr=0.1, groups=[OptimizerGroup(["a"], 1.0, 0.1), OptimizerGroup(["b"], 1.0, 0.0)])
    engine = engine_for(rank, world, placement, Scalars(a=1.0, b=1.0), config, tiers=tiers_at(home, placement))
    engine.begin_step()
    engine.backward(engine.model(0.0, 0.0), last=True)
    update(engine, [], 0.1)
    return [float(engine.full_tensor(n)) for n in "ab"]


def split_groups(rank: int, world: int, placement: str, home: str, split: bool) -> dict[str, torch.Tensor]:
    """The same parameters in one group, or in two with equal settings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    groups = (
        [OptimizerGroup(["0.*"], 1.0, 0.1), OptimizerGroup(["*"], 1.0, 0.1 + 1e-12)]
        if split
        else [OptimizerGroup(["*"], 1.0, 0.1)]
    )
    engine = engine_for(rank, world, placement, model, OptimizerConfig(lr=0.01, groups=groups), tiers=tiers_at(home, placement))
    for step in range(3):
        engine.begin_step()
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step * 10 + rank))
        engine.backward(model(x).square().mean() / world, last=True)
        update(engine, [], 0.01)
    return {b.name: engine.full_tensor(b.name) for b in engine.bindings}


class TwoPaths(nn.Module):
    """Two layers; `order` says which is computed first, `encoder` is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, flip: bool) -> torch.Tensor:
        x, y = self.encoder(x), self.encoder(x.flip(0))
        first, second = (self.b, self.a) if flip else (self.a, self.b)
        return (torch.tanh(second(torch.tanh(first(x)))) + 0.5 * y).square().mean()


def rank_dependent_order(rank: int, world: int, placement: str, precision: str) -> dict[str, torch.Tensor]:
    """Ranks that finish gradients in different orders, and a module used twice."""
    made = BF16 if precision == "bf16" else Precision()
    engine = engine_for(rank, world, placement, TwoPaths(), sgd(), precision=made)
    engine.begin_step()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank)).to(next(engine.model.parameters()).dtype)
    engine.backward(engine.model(x, flip=bool(rank)) / world, last=True)
    engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    return {b.name: engine.full_tensor(b.name, "gradient") for b in engine.bindings}


class Late(nn.Module):
    """`late` takes part only when asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, with_late: bool) -> torch.Tensor:
        return self.first(x) + self.late(x) if with_late else self.first(x)


def late_parameter(rank: int, world: int, placement: str) -> list[torch.Tensor]:
    """A parameter first used in the last of three micro-batches under bf16 compute, then never again."""
    engine = engine_for(rank, world, placement, Late(), sgd(), micro_batches=3, precision=BF16)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    out = []
    for step in range(2):
        engine.begin_step()
        for i in range(3):
            y = engine.model(x, with_late=step == 0 and i == 2)
            engine.backward(y.float().sum() / (3 * world), last=i == 2)
        engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
        out.append(engine.full_tensor("late.weight", "gradient"))
        before = engine.full_tensor("late.weight")
        engine.update(0.1, 0.0, 1.0)
        out.append(engine.full_tensor("late.weight") - before)
    return out


def bf16_masters(rank: int, world: int, placement: str) -> tuple[float, float, str]:
    """100 SGD steps of 1e-3 from 1.0: updates below bf16's resolution must not vanish."""
    engine = engine_for(rank, world, placement, Scalars(w=1.0), sgd(1e-3), precision=BF16)
    for _ in range(100):
        engine.begin_step()
        engine.backward(engine.model(1.0) / world, last=True)
        update(engine, [], 1e-3)
    with engine.full_parameters():
        seen = float(engine.model.w)
    return float(engine.full_tensor("w")), seen, str(engine.full_tensor("w").dtype)


def bf16_accumulation(rank: int, world: int, placement: str) -> float:
    """512 micro-gradients of 1.0: in bf16 the sum would stop at 256."""
    engine = engine_for(rank, world, placement, Scalars(w=1.0), sgd(), micro_batches=512, precision=BF16)
    engine.begin_step()
    for i in range(512):
        engine.backward(engine.model(1.0), last=i == 511)
    engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    return float(engine.full_tensor("w", "gradient")) / world


def overflow(rank: int, world: int, placement: str, home: str) -> list[Any]:
    """fp16 with a dynamic scale: an infinite gradient on one rank skips the update on all and halves the scale."""
    precision = Precision("float16", "float32", "float32", "float32", "float32", LossScale(initial=1024.0, interval=2))
    engine = engine_for(rank, world, placement, Scalars(w=1.0), sgd(), precision=precision, tiers=tiers_at(home, placement))
    out = []
    for bad in (False, True, False, False):
        engine.begin_step()
        engine.backward(engine.model(float("inf") if bad and rank == world - 1 else 1.0) / world, last=True)
        norm, _ = engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
        out.append((engine.update(0.1, 0.0, norm), engine.scaler.value, round(float(engine.full_tensor("w")), 4), engine.updates))
    return out


def tied(rank: int, world: int, placement: str) -> tuple[float, bool]:
    """y = e * (e * x) built on the meta device: the gradient of e is 2, and both names stay one tensor."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Linear(1, 1, bias=False)
            self.head = nn.Linear(1, 1, bias=False)
            self.head.weight = self.e.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.e(x))

    with torch.device("meta"):
        model = Tied()
    made = make_plan(world, placement)
    config = sgd(0.0)
    engine = StateEngine(model, made, Mesh(made.layout, rank, torch.device("cpu")), config, make_sgd(config))
    engine.materialize(lambda _n, shape: torch.ones(shape))
    for _ in range(3):
        engine.begin_step()
        engine.backward(model(torch.ones(1, 1)).sum() / world, last=True)
        update(engine, [], 0.0)
    return float(engine.full_tensor("e.weight", "gradient")), model.head.weight is model.e.weight


def evaluation_between(rank: int, world: int, placement: str, home: str, mode: str) -> dict[str, torch.Tensor]:
    """An evaluation between forward and backward must change nothing."""
    from reference import Model, batch, loss_sum

    engine = engine_for(rank, world, placement, Model(), sgd(), tiers=tiers_at(home, placement))
    ids, labels = batch(0, 4)
    engine.begin_step()
    loss = loss_sum(engine.model(ids), labels)
    if mode != "none":
        engine.model.eval()
        with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
            engine.model(batch(7, 2)[0])
        engine.model.train()
    engine.backward(loss / world, last=True)
    engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    return {b.name: engine.full_tensor(b.name, "gradient") for b in engine.bindings if b.parameter.requires_grad}


def odd_shapes(rank: int, world: int, placement: str) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    """Parameters of 8, 0, 24, 3 elements and a scalar."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = {"eight": (8,), "none": (0,), "many": (2, 3, 4), "three": (3,), "one": ()}
            for i, (n, s) in enumerate(shapes.items()):
                self.register_parameter(n, nn.Parameter(torch.full(s, float(i + 1))))

        def forward(self) -> torch.Tensor:
            return sum((p.square().sum() for p in self.parameters()), torch.zeros(()))

    engine = engine_for(rank, world, placement, Odd(), sgd())
    for _ in range(3):
        engine.begin_step()
        engine.backward(engine.model() / world, last=True)
        update(engine, [], 0.1)
    whole = {b.name: engine.full_tensor(b.name) for b in engine.bindings}
    return whole, {s.key: s.shape for s in engine.load_slices()}


def memory(rank: int, world: int, placement: str, precision: str, tiers: Tiers, parts: int, replicate: int = 1) -> Any:
    """Bytes of states between the micro-batches of an update, by place: (planned, allocated)."""
    from reference import Model, batch, loss_sum

    plan = make_plan(
        world,
        placement,
        precision=BF16 if precision == "bf16" else Precision(),
        micro_batches=parts,
        tiers=tiers,
        replicate=replicate,
    )
    config = OptimizerConfig()
    mesh = Mesh(plan.layout, rank, torch.device("cpu"))
    engine = StateEngine(Model(), plan, mesh, config, make_adamw(config), tiers=make_tiers(rank, tiers))
    engine.materialize()
    ids, labels = batch(0, 2)
    engine.begin_step()
    engine.backward(loss_sum(engine.model(ids), labels), last=parts == 1)
    for unit in engine.units:
        unit.free()
    places = ("accelerator", "host", "file")
    out = {p: engine.layout.bytes(p) for p in places}, {p: engine.allocated(p) for p in places}
    engine.close()
    return out


def narrow_wire(rank: int, world: int, placement: str, native: bool) -> float:
    """Gradient of one scalar whose parts bfloat16 can't hold, under `collectives.gradient_reduce.format`; sums are float32."""
    plan = make_plan(world, placement)
    plan = replace(plan, collectives=Collectives(gradient_reduce=Wire(format="bfloat16")))
    made = NativeCollectives() if native else None
    config = sgd()
    engine = StateEngine(Scalars(w=0.0), plan, Mesh(plan.layout, rank, torch.device("cpu")), config, make_sgd(config), made)
    engine.materialize()
    engine.begin_step()
    engine.backward(engine.model(1.001 if rank == 0 else 256.0), last=True)
    engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    return float(engine.full_tensor("w", "gradient"))


def changed_gradient(rank: int, world: int, placement: str) -> tuple[float, dict[str, torch.Tensor]]:
    """One gradient is doubled, another projected onto a row, between reduction and update; SGD lr 1."""
    with mock.patch.object(engine_module, "WORTH_COMPILING", 0):
        engine = engine_for(rank, world, placement, TwoPaths(), sgd(1.0))
    engine.begin_step()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine.model(x, flip=False) / world, last=True)
    engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
    with engine.full_gradient("a.weight") as gradient:
        gradient.mul_(2)
    with engine.full_gradient("b.weight") as gradient:
        gradient[1:] = 0
    norm = engine.gradient_norm()
    engine.update(1.0, 0.0, norm)
    return norm, {b.name: engine.full_tensor(b.name) for b in engine.bindings}


class Gated(nn.Module):
    """Three blocks; `skip` is not run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int | None) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i == skip else torch.tanh(block(x))
        return x


def diverge(rank: int, world: int, placement: str, prefetch: int) -> None:
    """Rank 0 leaves out one block, rank 1 another."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    made, config = replace(make_plan(world, placement), extensions={"prefetch": prefetch}), sgd()
    engine = StateEngine(Gated(), made, Mesh(made.layout, rank, torch.device("cpu")), config, make_sgd(config))
    engine.materialize()
    engine.begin_step()
    engine.backward(engine.model(torch.ones(2, 4), skip=rank).sum(), last=True)
    engine.finish_gradients(torch.zeros(1, dtype=torch.float64))


def calls_more_often(rank: int, world: int, placement: str) -> None:
    """A block is called once on rank 0 and twice on rank 1, with another block in between."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)

    class Again(Gated):
        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            for i in (0, 1, 2) * times:
                x = torch.tanh(self.blocks[i](x))
            return x

    made, config = replace(make_plan(world, placement), extensions={"prefetch": 0}), sgd()
    engine = StateEngine(Again(), made, Mesh(made.layout, rank, torch.device("cpu")), config, make_sgd(config))
    engine.materialize()
    engine.begin_step()
    engine.backward(engine.model(torch.ones(2, 4), rank + 1).sum(), last=True)
    engine.finish_gradients(torch.zeros(1, dtype=torch.float64))
