"""Compressed collectives on real ranks: error feedback loses nothing for good, ranks agree to the bit, bytes are those of the formula."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "distributed"), str(ROOT / "state"), str(ROOT / "train")]

import commands
import engine_runs
from pool import run_ranks

from partita.plan.plan import Collectives, Layout, Plan, Wire
from partita.runtime.collectives import CollectiveContext
from partita.runtime.mesh import Mesh
from partita.runtime.transport import LoggedTransport
from partita.state.engine import StateEngine
from partita_compression.exchange import Exchange, gather
from partita_compression.formats import FORMATS
from partita_compression.provider import CompressedCollectives
from partita_compression.settings import EXTENSION, Settings

PART, STEPS = 320, 30  # 320 is no multiple of a block


def _mesh(rank: int, world: int, **axes: int) -> Mesh:
    return Mesh(Layout(**(axes or {"shard": world})), rank, torch.device("cpu"))


def _gradient(rank: int, step: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)


def sum_with_feedback(rank: int, world: int, format: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(sum of all outputs plus what errors still hold, sum of all true sums, relative error of the sum without the errors)."""
    mesh = _mesh(rank, world)
    group = mesh.group(("shard",))
    exchange = Exchange(FORMATS[format], group, PART * world, LoggedTransport(), mesh.device, feedback=True, shared=False)
    total, true, output = torch.zeros(PART), torch.zeros(PART), torch.empty(PART)
    mine = slice(rank * PART, (rank + 1) * PART)
    for step in range(STEPS):
        exchange.reduce_scatter(output, _gradient(rank, step, PART * world), accumulate=False).wait()
        total += output
        true += sum(_gradient(r, step, PART * world)[mine] for r in range(world))
    held = exchange.errors["sender"].clone()
    torch.distributed.all_reduce(held)
    return total + held[mine], true, float((total - true).norm() / true.norm())


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "onebit"])
@pytest.mark.parametrize("world", [2, 4])
def test_errors_hold_exactly_what_has_not_arrived(format: str, world: int) -> None:
    for got, want, off in run_ranks(world, sum_with_feedback, format):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
        assert off < {"int8": 0.01, "int4": 0.1, "fp8": 0.02, "onebit": 0.6}[format]


def sum_everywhere(rank: int, world: int, format: str, feedback: bool, n: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    mesh, transport = _mesh(rank, world), LoggedTransport()
    group = mesh.group(("shard",))
    exchange = Exchange(FORMATS[format], group, n, transport, mesh.device, feedback=feedback, shared=True)
    buffer = _gradient(rank, 0, n)
    exchange.all_reduce(buffer).wait()
    return buffer, sum(_gradient(r, 0, n) for r in range(world)), transport.take()["gradient_reduce"].bytes


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("n", [64 * 4, 1000, 5])
def test_a_sum_is_the_same_to_the_bit_on_all_ranks(n: int, feedback: bool) -> None:
    got = run_ranks(4, sum_everywhere, "int8", feedback, n)
    for buffer, want, sent in got:
        assert torch.equal(buffer, got[0][0])
        assert (buffer - want).norm() / want.norm() < 0.02
        part = -(-n // 256) * 64
        assert sent == 2 * 3 * (part + 4 * -(-part // 256))  # to three others, to be summed and then the sum


def not_finite(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = _mesh(rank, world)
    exchange = Exchange(FORMATS["int8"], mesh.group(("shard",)), 512, LoggedTransport(), mesh.device, feedback=True, shared=True)
    first, second = torch.ones(512), torch.ones(512)
    if rank == 1:
        first[7] = float("inf")
    exchange.all_reduce(first).wait()
    exchange.all_reduce(second).wait()
    return first, second


def test_a_message_that_is_not_finite_is_seen_and_leaves_no_trace() -> None:
    for first, second in run_ranks(2, not_finite):
        assert not first.isfinite().all()
        torch.testing.assert_close(second, torch.full((512,), 2.0), rtol=0.02, atol=0)


def gathered(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    mesh, transport = _mesh(rank, world), LoggedTransport()
    true = torch.randn(world * PART, generator=torch.Generator().manual_seed(3))
    whole = torch.zeros_like(true)
    whole.view(world, -1)[rank] = true.view(world, -1)[rank]
    gather(FORMATS["int8"], transport, whole, mesh.group(("shard",))).wait()
    return whole, true, transport.take()["parameter_gather"].bytes


def test_gathered_weights_are_the_same_on_all_ranks() -> None:
    got = run_ranks(4, gathered)
    for whole, true, sent in got:
        assert torch.equal(whole, got[0][0])
        assert (whole - true).norm() / true.norm() < 0.01
        assert sent == 3 * (PART + 8)


# ------------------------------------------------------------------ under the engine


def train(rank: int, world: int, placement: str, wires: dict[str, Wire], settings: Settings, replicate: int = 1) -> Any:
    """(losses, bytes of gradients sent in the last update, whole weights)."""
    plan = engine_runs.make_plan(world, placement, micro_batches=2, replicate=replicate)
    plan = Plan(
        layout=plan.layout, placement=plan.placement, schedule=plan.schedule,
        collectives=Collectives(**wires, provider="compressed"), extensions={EXTENSION: settings},
    )  # fmt: skip
    mesh, transport = Mesh(plan.layout, rank, torch.device("cpu")), LoggedTransport()
    collectives = CompressedCollectives(CollectiveContext(mesh, plan, transport))
    config = engine_runs.optimizer_config("sgd")
    engine = StateEngine(engine_runs.Model(), plan, mesh, config, engine_runs.make_sgd(config), collectives)
    engine.materialize()
    losses, sent = [], {}
    for n in range(10):
        losses.append(engine_runs.step(engine, n, 16, rank, config.lr, 0.0)[0])
        sent = transport.take()
    weights = {b.name: engine.full_tensor(b.name) for b in engine.bindings}
    with engine.full_parameters():
        copies = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    return losses, {k: v.bytes for k, v in sent.items()}, weights, copies


PLAIN = Settings(node_ranks=2)
INT8 = {"gradient_reduce": Wire(format="int8")}


@pytest.mark.parametrize("placement", list(engine_runs.PLACEMENTS))
def test_int8_gradients_train_as_float32_does_at_every_stage(placement: str) -> None:
    want = run_ranks(2, engine_runs.run, placement, "sgd", 10, 16, 0.0, kwargs={"micro_batches": 2})[0]
    for got in run_ranks(2, train, placement, INT8, Settings(feedback=True)):
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=5e-3, atol=0)
        for name, value in got[3].items():
            assert torch.equal(value, got[2][name]), name


@pytest.mark.parametrize("placement", ["replicated", "gradients", "parameters"])
def test_two_levels_give_the_sums_of_one(placement: str) -> None:
    want = run_ranks(4, engine_runs.run, placement, "sgd", 10, 16, 0.0, kwargs={"micro_batches": 2})[0]
    wires = {"gradient_reduce": Wire(algorithm="hierarchical")}
    for got in run_ranks(4, train, placement, wires, PLAIN):
        torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-5, atol=0)


def test_the_slow_level_alone_is_compressed() -> None:
    """Hybrid sharding, 2 nodes of 2: scattered natively inside, int8 between the replicas."""
    native = run_ranks(4, train, "parameters", {}, PLAIN, 2)[0]
    slow = run_ranks(4, train, "parameters", INT8, Settings(slow_only=True, node_ranks=2), 2)[0]
    every = run_ranks(4, train, "parameters", INT8, PLAIN, 2)[0]
    assert every[1]["gradient_reduce"] < slow[1]["gradient_reduce"] < native[1]["gradient_reduce"]
    torch.testing.assert_close(torch.tensor(slow[0]), torch.tensor(native[0]), rtol=5e-3, atol=0)


def test_warm_up_is_native_to_the_bit() -> None:
    native = run_ranks(2, train, "gradients", {}, PLAIN)[0]
    warm = run_ranks(2, train, "gradients", {"gradient_reduce": Wire(format="onebit")}, Settings(warmup=5, feedback=True))[0]
    assert warm[0][:6] == native[0][:6]  # the loss of an update is that before it
    assert warm[0][7:] != native[0][7:]
    assert warm[1]["gradient_reduce"] < 0.1 * native[1]["gradient_reduce"]


def test_errors_are_resumed(tmp_path: Path) -> None:
    """Through the command line: bit for bit in the same layout; elsewhere they start at nothing, and the run goes on."""
    base = ("compression=onebit", "compression.warmup=0", "zero.stage=2", "parallel.data=2", "lr_schedule=constant")
    commands.train(tmp_path / "whole", *base, "train.save_every=6", "train.keep=5")
    commands.train(tmp_path / "again", *base, f"train.resume={tmp_path}/whole/checkpoints/step-00000006")
    assert commands.column(tmp_path / "again", "loss") == commands.column(tmp_path / "whole", "loss")[6:]
    other = (*base[:3], "parallel.data=1", base[4], f"train.resume={tmp_path}/whole/checkpoints/step-00000006")
    commands.train(tmp_path / "other", *other)
    assert len(commands.column(tmp_path / "other", "loss")) == 6
