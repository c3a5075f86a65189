"""What the ranks of the compression tests run. Several checks go into one start of ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "distributed"), str(ROOT / "state"), str(ROOT / "train")]

import engine_runs
from reference import Model, batch, loss_sum

from partita.builtin import partita_provide as core_provide
from partita.config.schema import OptimizerConfig
from partita.plan.plan import Collectives, Layout, Wire
from partita.runtime.collectives import CollectiveContext
from partita.runtime.mesh import Mesh
from partita.runtime.transport import LoggedTransport
from partita.state.engine import StateEngine
from partita.train.checkpoint import Checkpointer
from partita.train.loading import load_slices
from partita_compression.exchange import Exchange, gather
from partita_compression.formats import FORMATS, TopK
from partita_compression.local import begin, meet
from partita_compression.provider import CompressedCollectives
from partita_compression.settings import EXTENSION, Local, Settings
from partita_compression.strategy import partita_provide
from partita_moe.dispatch import Exchange as RowExchange
from partita_moe.packing import PACKINGS

PART, STEPS = 320, 30  # 320 is no multiple of a block
CPU = torch.device("cpu")
NODES = Settings(node_ranks=2)
EVERY = {**FORMATS, "topk": TopK(1 / 16)}


def flat_mesh(rank: int, world: int) -> Mesh:
    """All ranks along one axis."""
    return Mesh(Layout(shard=world), rank, CPU)


def gradient(rank: int, step: int, n: int) -> torch.Tensor:
    """Of a rank, which is not as large as the next one's."""
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)


# ------------------------------------------------------------------ messages


def messages(rank: int, world: int) -> dict[str, Any]:
    """What comes out of sums and gathers of every kind."""
    mesh = flat_mesh(rank, world)
    out: dict[str, Any] = {f"feedback {name}": _sum_with_feedback(mesh, name) for name in EVERY}
    for n in (64 * 4, 1000, 5):
        for feedback in (False, True):
            out[f"everywhere {n} {feedback}"] = _sum_everywhere(mesh, n, feedback)
    out["not finite"] = {name: _not_finite(mesh, name) for name in EVERY}
    out["gathered"] = _gathered(mesh)
    out["average"] = _averaged(mesh)
    out["rows"] = {name: _rows(mesh, packing) for name, packing in [("native", None), *PACKINGS.items()]}
    return out


def _averaged(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """The error of two messages to another rank, and what LoCo's formula gives."""
    beta, group, n = 0.8, mesh.group(("shard",)), PART * mesh.world
    exchange = Exchange(FORMATS["int4"], group, n, LoggedTransport(), CPU, feedback=True, shared=False, average=beta)
    other = (mesh.rank + 1) % mesh.world
    wanted, packet = torch.zeros(PART), torch.empty(FORMATS["int4"].size(PART), dtype=torch.uint8)
    for step in range(2):
        source = gradient(mesh.rank, step, n)
        exchange.reduce_scatter(torch.empty(PART), source, accumulate=False).wait()
        meant = wanted + source.view(mesh.world, -1)[other]
        FORMATS["int4"].encode(meant, packet)
        arrived = torch.empty(PART)
        FORMATS["int4"].decode(packet, arrived)
        wanted = beta * wanted + (1 - beta) * (meant - arrived)
    return exchange.errors["sender"].view(mesh.world, -1)[other], wanted


def _rows(mesh: Mesh, packing: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows there, and gradients back: rank r sends i + 1 rows to rank i (to the last one none); one row is all zeros."""
    world, rank = mesh.world, mesh.rank
    sent = [*range(1, world), 0]
    received = [sent[rank]] * world
    x = gradient(rank, 0, sum(sent) * 24).view(-1, 24).clone()
    x[0] = 0
    x.requires_grad_()
    arrived = RowExchange(x, sent, received, mesh.group(("shard",)), packing).arrived()
    weights = gradient(rank, 1, arrived.numel()).view_as(arrived)
    (arrived * weights).sum().backward()
    assert x.grad is not None
    return arrived.detach(), x.grad


def _sum_with_feedback(mesh: Mesh, format: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(sum of all outputs plus what errors still hold, sum of all true sums, relative error of the sum without the errors)."""
    rank, world, group = mesh.rank, mesh.world, mesh.group(("shard",))
    exchange = Exchange(EVERY[format], group, PART * world, LoggedTransport(), CPU, feedback=True, shared=False)
    total, true, output = torch.zeros(PART), torch.zeros(PART), torch.empty(PART)
    mine = slice(rank * PART, (rank + 1) * PART)
    for step in range(STEPS):
        exchange.reduce_scatter(output, gradient(rank, step, PART * world), accumulate=False).wait()
        total += output
        true += sum(gradient(r, step, PART * world)[mine] for r in range(world))
    held = exchange.errors["sender"].clone()
    dist.all_reduce(held)
    return total + held[mine], true, float((total - true).norm() / true.norm())


def _sum_everywhere(mesh: Mesh, n: int, feedback: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    transport = LoggedTransport()
    exchange = Exchange(FORMATS["int8"], mesh.group(("shard",)), n, transport, CPU, feedback=feedback, shared=True)
    buffer = gradient(mesh.rank, 0, n)
    exchange.all_reduce(buffer).wait()
    return buffer, sum(gradient(r, 0, n) for r in range(mesh.world)), transport.take()["gradient_reduce"].bytes


def _not_finite(mesh: Mesh, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    exchange = Exchange(EVERY[format], mesh.group(("shard",)), 512, LoggedTransport(), CPU, feedback=True, shared=True)
    first, second = torch.ones(512), torch.ones(512)
    if mesh.rank == 1:
        first[7] = float("inf")
    exchange.all_reduce(first).wait()
    exchange.clean()
    exchange.all_reduce(second).wait()
    return first, second


def _gathered(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor, int]:
    transport = LoggedTransport()
    true = torch.randn(mesh.world * PART, generator=torch.Generator().manual_seed(3))
    whole = torch.zeros_like(true)
    whole.view(mesh.world, -1)[mesh.rank] = true.view(mesh.world, -1)[mesh.rank]
    gather(FORMATS["int8"], transport, whole, mesh.group(("shard",))).wait()
    return whole, true, transport.take()["parameter_gather"].bytes


# ------------------------------------------------------------------ under the engine


@dataclass(frozen=True)
class Case:
    """One training. format, gather: on the wire; `none`: the built-in collectives. freeze: of a rule that has one, in updates."""

    placement: str = "replicated"
    rule: str = "sgd"
    format: str = "native"
    gather: str = "native"
    hierarchical: bool = False
    settings: Settings = NODES
    replicate: int = 1
    micro_batches: int = 2
    freeze: int = 4
    spoil: int = -1  # an update in which rank 0 has a gradient that is not finite


@dataclass
class Outcome:
    """losses: before each update. sent: bytes by purpose in the last one. weights: whole, exact; read: those that compute reads."""

    losses: list[float]
    norms: list[float]
    sent: dict[str, int]
    weights: dict[str, torch.Tensor]
    read: dict[str, torch.Tensor]


def config_of(case: Case) -> OptimizerConfig:
    """The optimizer node."""
    special: dict[str, dict[str, Any]] = {
        "onebit_adam": {"freeze_step": case.freeze},
        "onebit_lamb": {"freeze_step": case.freeze},
        "zero_one_adam": {"var_freeze_step": 100, "var_update_scaler": case.freeze},
    }
    if case.rule == "sgd":
        return OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
    return OptimizerConfig(name=case.rule, lr=1e-2, betas=[0.9, 0.95], options=special.get(case.rule, {}))


def make(rank: int, world: int, case: Case) -> tuple[StateEngine, LoggedTransport]:
    """An engine over the odd model."""
    config = config_of(case)
    rule = (partita_provide("optimizer", case.rule) or core_provide("optimizer", case.rule))(config)
    plan = engine_runs.make_plan(world, case.placement, case.micro_batches, case.replicate)
    mesh, transport = Mesh(plan.layout, rank, CPU), LoggedTransport()
    if case.format == "none":
        engine = StateEngine(Model(), plan, mesh, config, rule)
        engine.materialize()
        return engine, transport
    algorithm = "hierarchical" if case.hierarchical else "flat"
    wires = Collectives(Wire(algorithm, case.format), Wire(algorithm, case.gather), provider="compressed")
    traffic = getattr(rule, "traffic", None)
    settings = replace(case.settings, traffic=(traffic,)) if traffic is not None else case.settings
    plan = replace(plan, collectives=wires, extensions={EXTENSION: settings})
    collectives = CompressedCollectives(CollectiveContext(mesh, plan, transport))
    engine = StateEngine(Model(), plan, mesh, config, rule, collectives)
    engine.materialize()
    return engine, transport


def train(rank: int, world: int, case: Case, updates: int = 10) -> Outcome:
    """Updates without clipping."""
    engine, transport = make(rank, world, case)
    return go_on(engine, transport, rank, case, range(updates))


def go_on(engine: StateEngine, transport: LoggedTransport, rank: int, case: Case, updates: range) -> Outcome:
    """Some updates more."""
    lr, losses, norms, sent = config_of(case).lr, [], [], {}
    for n in updates:
        if n == case.spoil and rank == 0:
            _spoil(engine)
        loss, norm = engine_runs.step(engine, n, 16, rank, lr, 0.0)
        losses.append(loss)
        norms.append(norm)
        sent = transport.take()
    weights = {b.name: engine.full_tensor(b.name) for b in engine.bindings}
    with engine.full_parameters():
        read = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    return Outcome(losses, norms, {k: v.bytes for k, v in sent.items()}, weights, read)


def _spoil(engine: StateEngine) -> None:
    """The next gradient of this rank that comes is not a number."""
    parameter = next(p for p in engine.model.parameters() if p.requires_grad and p.numel())
    handle = parameter.register_hook(lambda g: (handle.remove(), torch.full_like(g, torch.nan))[1])


def train_all(rank: int, world: int, cases: list[Case], updates: int = 10) -> list[Outcome]:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    return [train(rank, world, case, updates) for case in cases]


def train_locally(rank: int, world: int, case: Case, updates: int) -> Outcome:
    """Groups that meet as the settings say."""
    torch.set_num_threads(1)
    engine, transport = make(rank, world, case)
    begin(engine)
    every, found = case.settings.local.every, []
    for n in range(0, updates, every):
        found.append(go_on(engine, transport, rank, case, range(n, n + every)))
        meet(engine)
    last = go_on(engine, transport, rank, case, range(0))
    return replace(last, losses=[x for o in found for x in o.losses])


def plain_groups(groups: int, updates: int, local: Local) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in plain torch on one process: losses, and weights after the last meeting."""
    models = [Model() for _ in range(groups)]
    steps = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9) for m in models]
    last = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    speed, losses = {n: torch.zeros_like(p) for n, p in last.items()}, []
    for update in range(updates):
        ids, labels = batch(update, 16)
        total, sums = int((labels != -100).sum()), 0.0
        for model, step, x, y in zip(models, steps, ids.chunk(groups), labels.chunk(groups), strict=True):
            step.zero_grad()
            loss = loss_sum(model(x), y)
            (loss / total * groups).backward()
            step.step()
            sums += loss.item()
        losses.append(sums / total)
        if (update + 1) % local.every == 0:
            for name, before in last.items():
                way = before - sum(dict(m.named_parameters())[name].detach() for m in models) / groups
                if local.momentum is not None:
                    speed[name] = local.momentum * speed[name] + way
                    way = local.lr * (way + local.momentum * speed[name])
                last[name] = before - way
            for model in models:
                model.load_state_dict(last, strict=False)
    return losses, last


# ------------------------------------------------------------------ what is kept, and who takes it over


def kept_sums(engine: StateEngine) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, parameter) -> sum over all ranks of what they keep. Collective."""
    shapes = {b.name: b.parameter.numel() for b in engine.bindings if b.parameter.requires_grad}
    sums = {(kind, name): torch.zeros(n) for kind in ("error", "momentum") for name, n in shapes.items()}
    for bucket in engine.buckets:
        for s in bucket.wire_slices():
            words = s.key.split(".", 7)
            if words[2] in ("error", "momentum"):
                lo = int(words[6])
                sums[words[2], words[7]][lo : lo + s.data.numel()] += s.data
    for total in sums.values():
        dist.all_reduce(total)
    return sums


def write(rank: int, world: int, case: Case, folder: Path) -> tuple[dict[Any, torch.Tensor], list[float]]:
    """Train 8 updates, save; (what ranks keep, summed; losses of 4 more)."""
    engine, transport = make(rank, world, case)
    go_on(engine, transport, rank, case, range(8))
    checkpoints = Checkpointer(folder, engine.mesh, asynchronous=False)
    checkpoints.save(8, engine.save_slices(), {"engine": engine.extra_state()}, {})
    checkpoints.close()
    return kept_sums(engine), go_on(engine, transport, rank, case, range(8, 12)).losses


def read(rank: int, world: int, cases: list[Case], folder: Path) -> list[tuple[dict[Any, torch.Tensor], list[float]]]:
    """In each layout: what ranks keep after a load, summed; losses of 4 more updates."""
    out = []
    for case in cases:
        engine, transport = make(rank, world, case)
        index, _ = load_slices(folder, engine.load_slices())
        engine.after_load()
        engine.load_extra_state(index.extra["engine"])
        out.append((kept_sums(engine), go_on(engine, transport, rank, case, range(8, 12)).losses))
    return out
