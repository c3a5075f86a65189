"""Compressed collectives on real ranks: error feedback loses nothing for good, ranks agree to the bit, bytes are those of the formula."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import compression_runs
import engine_runs
from compression_runs import EVERY, PART, Case, Outcome
from pool import run_ranks

from partita_compression.settings import Local, Settings

OFF = {"int8": 0.01, "int4": 0.1, "fp8": 0.02, "onebit": 0.6, "topk": 0.6}


def test_messages() -> None:
    """Everything that needs no engine, in one start of four ranks."""
    got = run_ranks(4, compression_runs.messages)
    for name in EVERY:
        for total, true, off in (rank[f"feedback {name}"] for rank in got):  # errors hold exactly what has not arrived
            torch.testing.assert_close(total, true, rtol=1e-4, atol=2e-3)
            assert off < OFF[name]
    for n in (64 * 4, 1000, 5):
        for feedback in (False, True):
            for rank in got:
                buffer, want, sent = rank[f"everywhere {n} {feedback}"]
                assert torch.equal(buffer, got[0][f"everywhere {n} {feedback}"][0])
                assert (buffer - want).norm() / want.norm() < 0.02
                part = -(-n // 256) * 64
                assert sent == 2 * 3 * (part + 4 * -(-part // 256))  # to three others, to be summed and then the sum
    for rank in got:
        for name, (first, second) in rank["not finite"].items():  # it is seen, and leaves no trace
            assert not first.isfinite().all(), name
            assert second.isfinite().all(), name
            if name != "topk":
                torch.testing.assert_close(second, torch.full((512,), 4.0), rtol=0.05, atol=0)
        torch.testing.assert_close(*rank["average"], rtol=1e-4, atol=1e-5)
        whole, true, sent = rank["gathered"]
        assert torch.equal(whole, got[0]["gathered"][0])
        assert (whole - true).norm() / true.norm() < 0.01
        assert sent == 3 * (PART + 8)
        for name, off in (("bfloat16", 4e-3), ("int8", 1e-2), ("fp8", 5e-2)):
            for got_rows, rows in zip(rank["rows"][name], rank["rows"]["native"], strict=True):
                assert (got_rows - rows).norm() <= off * rows.norm()
                assert not rows.any() or not torch.equal(got_rows, rows)


# ------------------------------------------------------------------ under the engine


FEEDBACK = Settings(feedback=True, node_ranks=2)
PLACEMENTS = list(engine_runs.PLACEMENTS)
ONEBIT = Case("gradients", format="onebit", settings=Settings(warmup=5, feedback=True))
LOW = Settings(warmup=1, feedback=True, rank=2)
FEW: dict[str, Case] = {  # methods whose losses stay near those of their reference, and how near
    "topk": Case("optimizer", format="topk", settings=Settings(warmup=1, feedback=True, density=0.25)),
    "powersgd whole": Case("replicated", format="powersgd", settings=LOW),
    "powersgd cut": Case("optimizer", format="powersgd", settings=LOW),
    "powersgd every part": Case("parameters", format="powersgd", settings=LOW),
}
CASES: dict[str, Case] = {
    **{f"plain {p}": Case(p, format="none") for p in PLACEMENTS},
    **{f"int8 {p}": Case(p, format="int8", settings=FEEDBACK) for p in PLACEMENTS},
    **{f"rounded {p}": Case(p, gather="int8") for p in PLACEMENTS[1:]},
    "onebit": ONEBIT,
    "stochastic": Case("gradients", format="int8", settings=Settings(stochastic=True)),
    "loco": Case("gradients", format="int4", settings=Settings(feedback=True, average=0.2, reset=4)),
    **FEW,
    **{f"adamw {p}": Case(p, "adamw", "none") for p in PLACEMENTS},
    "lamb": Case(format="none", rule="lamb"),
    **{f"momentum {p}": Case(p, "onebit_adam") for p in PLACEMENTS},  # sent as it is
    **{f"onebit_adam {p}": Case(p, "onebit_adam", "onebit", settings=FEEDBACK) for p in PLACEMENTS},
    "zero_one_adam": Case("gradients", "zero_one_adam", "onebit", settings=FEEDBACK),
    "onebit_lamb": Case("replicated", "onebit_lamb", "onebit", settings=FEEDBACK),
    "skipped": Case("gradients", "onebit_adam", "onebit", settings=FEEDBACK, spoil=6),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Outcome]]:
    """All trainings of two ranks, in one start."""
    got = run_ranks(2, compression_runs.train_all, list(CASES.values()), timeout=150)
    return {name: [rank[i] for rank in got] for i, name in enumerate(CASES)}


def near(got: list[Outcome], want: list[Outcome], bound: float) -> None:
    """Losses of all ranks."""
    for outcome in got:
        torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(want[0].losses), rtol=bound, atol=0)


def ends_near(got: list[Outcome], want: list[Outcome], bound: float) -> None:
    """The last three losses: single messages in few bits are far off, and their sums are not."""
    assert sum(got[0].losses[-3:]) == pytest.approx(sum(want[0].losses[-3:]), rel=bound)


def same_weights(got: list[Outcome]) -> None:
    """Compute reads the exact weights, the same on all ranks."""
    for outcome in got:
        for name, value in outcome.read.items():
            assert torch.equal(value, outcome.weights[name]), name
            assert torch.equal(value, got[0].read[name]), name


def test_int8_gradients_train_as_float32_does_at_every_stage(trained) -> None:
    for p in PLACEMENTS:
        near(trained[f"int8 {p}"], trained["plain replicated"], 5e-3)
        same_weights(trained[f"int8 {p}"])
    near(trained["stochastic"], trained["plain replicated"], 1e-2)
    ends_near(trained["loco"], trained["plain replicated"], 2e-2)


def test_rounded_weights_are_the_same_everywhere_and_exact_ones_stay(trained) -> None:
    for p in PLACEMENTS[1:]:
        got = trained[f"rounded {p}"]
        near(got, trained["plain replicated"], 3e-2)
        for outcome in got:
            assert all(torch.equal(v, got[0].read[n]) for n, v in outcome.read.items())
            off = max(float((v - outcome.weights[n]).abs().max()) for n, v in outcome.read.items() if v.numel())
            assert 0 < off < 0.05


def test_warm_up_is_native_to_the_bit(trained) -> None:
    native, warm = trained["plain gradients"][0].losses, trained["onebit"][0]
    assert warm.losses[:6] == native[:6]  # the loss of an update is that before it
    assert warm.losses[7:] != native[7:]
    assert warm.sent["gradient_reduce"] < 0.1 * trained["int8 gradients"][0].sent["gradient_reduce"] * 4


def test_few_numbers_with_feedback_stay_near(trained) -> None:
    for name in FEW:
        ends_near(trained[name], trained["plain replicated"], 5e-2)
        same_weights(trained[name])
        assert trained[name][0].losses[3:] != trained["plain replicated"][0].losses[3:]


def test_before_the_freeze_the_rules_are_the_plain_ones_to_the_bit(trained) -> None:
    for p in PLACEMENTS:
        few, plain = trained[f"onebit_adam {p}"][0].losses, trained[f"adamw {p}"][0].losses
        assert few[:5] == plain[:5] and few[6:] != plain[6:], p
    assert trained["zero_one_adam"][0].losses[:5] == trained["adamw gradients"][0].losses[:5]
    assert trained["onebit_lamb"][0].losses[:5] == trained["lamb"][0].losses[:5]


def test_the_momenta_of_the_ranks_add_up(trained) -> None:
    """Without losses on the wire every stage trains alike, micro-batches that are reduced one by one too."""
    for p in PLACEMENTS[1:]:
        near(trained[f"momentum {p}"], trained["momentum replicated"], 2e-3)


def test_few_bit_optimizers_stay_near(trained) -> None:
    for p in PLACEMENTS:
        ends_near(trained[f"onebit_adam {p}"], trained["momentum replicated"], 0.2)
        same_weights(trained[f"onebit_adam {p}"])
    ends_near(trained["zero_one_adam"], trained["adamw replicated"], 0.1)
    ends_near(trained["onebit_lamb"], trained["lamb"], 0.1)
    same_weights(trained["onebit_lamb"])


def test_a_skipped_update_leaves_nothing_that_is_no_number(trained) -> None:
    for outcome in trained["skipped"]:
        assert outcome.norms[6] != outcome.norms[6]
        assert all(x == x for x in outcome.norms[7:])
        assert all(v.isfinite().all() for v in outcome.weights.values())


# ------------------------------------------------------------------ two levels


INT8 = "int8"
LEVELS: dict[str, Case] = {
    "plain": Case(format="none"),
    **{f"two {p}": Case(p, hierarchical=True) for p in ("replicated", "gradients", "parameters")},
    **{f"two int8 {p}": Case(p, format=INT8, hierarchical=True, settings=FEEDBACK) for p in ("replicated", "parameters")},
    "hybrid native": Case("parameters", replicate=2),
    "hybrid slow": Case("parameters", format=INT8, settings=Settings(slow_only=True, node_ranks=2), replicate=2),
    "hybrid all": Case("parameters", format=INT8, replicate=2),
    "zero3": Case("parameters", micro_batches=1),
    "zeropp": Case("hpz", format=INT8, gather=INT8, settings=FEEDBACK, replicate=2, micro_batches=1),
    "zeropp int4": Case("hpz", format="int4", gather=INT8, settings=FEEDBACK, replicate=2, micro_batches=1),
    "zeropp two": Case("hpz", format=INT8, gather=INT8, settings=FEEDBACK, replicate=2, micro_batches=2),
    "hfsdp": Case("hfsdp", format=INT8, settings=FEEDBACK, replicate=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def levels() -> dict[str, list[Outcome]]:
    """All trainings of four ranks, in one start."""
    got = run_ranks(4, compression_runs.train_all, list(LEVELS.values()), timeout=150)
    return {name: [rank[i] for rank in got] for i, name in enumerate(LEVELS)}


def test_two_levels_give_the_sums_of_one(levels) -> None:
    for p in ("replicated", "gradients", "parameters"):
        near(levels[f"two {p}"], levels["plain"], 1e-5)
    for p in ("replicated", "parameters"):
        near(levels[f"two int8 {p}"], levels["plain"], 5e-3)
        same_weights(levels[f"two int8 {p}"])


def test_the_slow_level_alone_is_compressed(levels) -> None:
    """Hybrid sharding, 2 nodes of 2: scattered natively inside, int8 between the replicas."""
    native, slow, every = (levels[f"hybrid {x}"][0] for x in ("native", "slow", "all"))
    assert every.sent["gradient_reduce"] < slow.sent["gradient_reduce"] < native.sent["gradient_reduce"]
    near(levels["hybrid slow"], levels["hybrid native"], 5e-3)


def test_zeropp_sends_a_quarter_of_zero3(levels) -> None:
    """Of everything that a rank sends in an update, inside nodes as well; 4-bit gradients, and more micro-batches, send less."""
    total = {name: sum(levels[name][0].sent.values()) for name in ("zero3", "zeropp", "zeropp int4")}
    assert total["zeropp"] <= 0.27 * total["zero3"]
    assert total["zeropp int4"] < 0.9 * total["zeropp"]
    for name in ("zeropp", "zeropp int4", "zeropp two"):
        near(levels[name], levels["plain"], 3e-2)
        assert all(torch.equal(v, levels[name][0].read[n]) for o in levels[name] for n, v in o.read.items())
    near(levels["hfsdp"], levels["plain"], 5e-3)


# ------------------------------------------------------------------ groups that train for themselves


@pytest.mark.parametrize(
    ("world", "placement", "local", "bound"),
    [
        (2, "replicated", Local(3), 1e-5),
        (4, "parameters", Local(3, 0.7, 0.9), 1e-5),
        (4, "optimizer", Local(3, 0.7, 0.9, "int8"), 2e-2),
    ],
)
def test_groups_meet_where_plain_ones_do(world: int, placement: str, local: Local, bound: float) -> None:
    """Two groups, against two plain trainings whose weights are averaged, or gone on from as DiLoCo says."""
    losses, weights = compression_runs.plain_groups(2, 6, local)
    case = Case(placement, settings=Settings(local=local), replicate=2)
    for outcome in run_ranks(world, compression_runs.train_locally, case, 6):
        assert outcome.losses == pytest.approx(losses, rel=bound)
        for name, value in weights.items():
            torch.testing.assert_close(outcome.weights[name], value, rtol=bound, atol=bound)
            assert torch.equal(outcome.read[name], outcome.weights[name])


# ------------------------------------------------------------------ another number of ranks


def test_what_ranks_keep_is_taken_over_by_any_layout(tmp_path: Path) -> None:
    """Errors and momentum: bit for bit in the same layout, in others their sum over the ranks."""
    source = Case("replicated", "onebit_adam", "onebit", settings=FEEDBACK, replicate=1)
    want, losses = run_ranks(4, compression_runs.write, source, tmp_path)[0]
    others = [Case(p, "onebit_adam", "onebit", settings=FEEDBACK, hierarchical=h, replicate=r) for p, h, r in (
        ("replicated", False, 1), ("replicated", True, 1), ("gradients", True, 1), ("parameters", False, 2), ("hpz", False, 2),
    )]  # fmt: skip
    four = run_ranks(4, compression_runs.read, others, tmp_path)[0]
    assert four[0][1] == losses
    two = run_ranks(
        2, compression_runs.read, [Case(p, "onebit_adam", "onebit", settings=FEEDBACK) for p in PLACEMENTS], tmp_path
    )[0]
    for sums, after in [*four, *two]:
        check_sums(sums, want)
        torch.testing.assert_close(torch.tensor(after), torch.tensor(losses), rtol=0.15, atol=0)
    ((alone, _),) = run_ranks(1, compression_runs.read, [Case("replicated", "onebit_adam", "native")], tmp_path)[0]
    for (kind, name), total in alone.items():
        torch.testing.assert_close(
            total, want[kind, name] if kind == "momentum" else torch.zeros_like(total), rtol=1e-5, atol=1e-7
        )


def check_sums(sums: dict[Any, torch.Tensor], want: dict[Any, torch.Tensor]) -> None:
    """What ranks keep, summed."""
    assert any(float(v.abs().max()) > 0 for (kind, _), v in want.items() if kind == "error" and v.numel())
    for key, total in sums.items():
        torch.testing.assert_close(total, want[key], rtol=1e-5, atol=1e-7)
