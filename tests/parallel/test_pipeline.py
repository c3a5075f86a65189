"""Pipelines against one rank: the same 20 losses, gradient norms and evaluation, with dropout, whatever the schedule and what is cut."""

from __future__ import annotations

import copy

import pytest
import torch
from layouts import assert_same, planned, reference, spec_of, train
from pool import run_ranks
from torch import nn

from partita.plan.schedules import bubble
from partita_parallel.pipeline_defer import Deferral
from partita_parallel.pipeline_order import STAGES, course_of, orders, simulate

# plain SGD shows a scale that Adam would hide; without clipping, so does the norm
SGD = ("optimizer=sgd", "optimizer.lr=0.05", "train.grad_clip=0", "model.layers=5")
P2 = ("parallel.pipeline=2", "parallel.data=2", "train.micro_batch=1")


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        ("gpipe", 0),
        ("gpipe", 3),
        ("1f1b", 1),
        ("1f1b", 2),
        ("1f1b", 3),
        ("interleaved", 2),
        ("interleaved_zb", 1),
        ("interleaved_zb", 3),
        ("zbv", 0),
        ("zbv", 2),
        ("zbv", 3),
        ("dualpipev", 1),
        ("dualpipev", 3),
    ],
)
def test_each_schedule_with_zero(tmp_path, schedule, stage):
    got = train(tmp_path, *SGD, *P2, f"+strategy=zero{stage}", f"parallel.schedule={schedule}", evaluate=True)
    assert_same(got, reference(*SGD))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (("model=llama", "model.layers=4"), ("parallel.pipeline=4", "parallel.schedule=1f1b")),
        (("model=bert", "model.layers=8"), ("parallel.pipeline=4", "parallel.schedule=zbv", "recompute=full")),
        (("model.tie_embeddings=false", "model.layers=3"), ("parallel.pipeline=2", "parallel.stages=[2,1]")),
    ],
    ids=["llama", "bert", "untied"],
)
def test_models(tmp_path, model, layout):
    assert_same(train(tmp_path, *model, *layout, "parallel.data=1", "train.micro_batch=1", evaluate=True), reference(*model))


@pytest.mark.parametrize("options", [("parallel.reduce_every=3",), ("parallel.gather=action",), ("parallel.gather=step",)])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_how_often_states_are_reduced_and_gathered(tmp_path, schedule, options):
    got = train(tmp_path, *SGD, *P2, "+strategy=zero3", f"parallel.schedule={schedule}", *options, steps=6)
    assert_same(got, reference(*SGD, steps=6))


def test_fewer_reductions_without_a_pipeline(tmp_path):
    layout = ("parallel.data=2", "+strategy=zero2", "train.micro_batch=1", "parallel.reduce_every=3")
    assert_same(train(tmp_path, *SGD, *layout, steps=6), reference(*SGD, steps=6))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_hugging_face_models(tmp_path, kind):
    model = ("model=hf", f"+model.options.model_type={kind}", "model.dropout=0", "model.layers=4")
    got = train(tmp_path, *SGD, *model, *P2, "+strategy=zero3", "parallel.schedule=zbv", evaluate=True, steps=6)
    assert_same(got, reference(*SGD, *model, steps=6))


def test_bf16_with_recompute(tmp_path):
    got = train(
        tmp_path, "model.layers=4", *P2, "+strategy=zero3", "precision=bf16", "recompute=selective", "parallel.schedule=zbv"
    )
    assert got["losses"] == pytest.approx(reference("model.layers=4")["losses"], rel=1e-2)


# ------------------------------------------------------------------ what ranks hold


def held(rank, world, spec):
    """(parameter elements of this rank's modules, names) before anything is allocated, and copies of the tied weight after training."""
    import torch

    from partita.train.loop import StepClock, one_update
    from partita.train.run import open_run

    torch.set_num_threads(1)
    run = open_run(spec)
    try:
        clock = StepClock()
        for step, batches in run.data.iterate(1, 3):
            one_update(run, step, batches, clock)
        names = [b.name for b in run.engine.bindings]
        tied = run.engine.full_tensor("tokens.weight") if "tokens.weight" in names else None
        text = None
        with run.engine.full_parameters():
            from partita.models.sample import generate

            text = generate(run.executor.whole, run.tokenizer, "ab", 5, 0)
        return names, sum(b.parameter.numel() for b in run.engine.bindings), tied, text
    finally:
        run.data.close()
        run.checkpoints.close()
        run.metrics.close()


def test_a_rank_holds_its_stages_only_and_tied_copies_stay_equal(tmp_path):
    spec = spec_of(tmp_path, "model.layers=4", "parallel.pipeline=2", "parallel.data=1", "train.micro_batch=2")
    (first, n0, tied0, text0), (last, n1, tied1, text1) = run_ranks(2, held, spec, timeout=100)
    assert "blocks.0.norm1.weight" in first and "blocks.0.norm1.weight" not in last
    assert "norm.weight" in last and "norm.weight" not in first
    assert (tied0 == tied1).all() and set(first) & set(last) == {"tokens.weight"}
    alone = run_ranks(1, held, spec_of(tmp_path / "one", "model.layers=4", "parallel.data=1", "train.micro_batch=2"), timeout=100)
    assert set(first) | set(last) == set(alone[0][0]) and max(n0, n1) < alone[0][1]
    assert text0 == text1 == alone[0][3]


def test_checkpoints_pass_between_layouts(tmp_path):
    """Updates in one layout, the next ones in another: all are those of one rank."""
    layouts = [
        ("parallel.pipeline=2", "parallel.data=2", "+strategy=zero3", "train.micro_batch=1"),
        ("parallel.pipeline=1", "parallel.data=2", "+strategy=zero1"),
        ("parallel.pipeline=2", "parallel.data=1", "parallel.schedule=zbv", "train.micro_batch=2"),
    ]
    expected = reference("model.layers=4", steps=15)
    losses = []
    for layout in layouts:
        losses += train(tmp_path, "model.layers=4", *layout, "train.resume=auto", steps=5, save=True)["losses"]
    assert losses == pytest.approx(expected["losses"], rel=1e-5)


def test_gradients_that_are_computed_later_are_those_of_autograd_and_begin_no_graph():
    """A graph would keep the activations, and refuse sums that are written in place."""
    whole = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4, bias=False))
    parts, deferral, stash = copy.deepcopy(whole), Deferral(), []
    deferral.install(parts)
    x = torch.randn(2, 3, 4, requires_grad=True)
    whole(x * 2).square().sum().backward()
    with deferral.into(stash):
        parts(x * 2).square().sum().backward()
    assert all(p.grad is None for p in parts.parameters())
    found = {id(p): compute() for p, compute in stash}
    for expected, p in zip(whole.parameters(), parts.parameters(), strict=True):
        assert not found[id(p)].requires_grad
        torch.testing.assert_close(found[id(p)], expected.grad)


# ------------------------------------------------------------------ what schedules come to


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (2, 16), (4, 40), (8, 32)])
def test_long_batches_wait_as_played_through_and_as_published(name, ranks, count):
    """The plan plays four rounds at most; formulas of the publications stand in where no order is known."""
    each = STAGES[name][0]
    found, whole = course_of(name, ranks, each, count), simulate(orders(name, ranks, each, count), ranks * each)
    assert found.bubble == pytest.approx(whole.bubble, abs=1e-12) and found.in_flight == whole.in_flight
    assert bubble(name, ranks, count, each) == pytest.approx(whole.bubble, abs=1e-12)


# ------------------------------------------------------------------ refused before launch


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["parallel.pipeline=3"], "parallel.pipeline", "3 stages can't be made of 2 blocks"),
        (["parallel.pipeline=2", "parallel.schedule=zbv"], "parallel.pipeline", "4 stages can't be made of 2 blocks"),
        (["parallel.pipeline=2", "train.micro_batch=8"], "parallel.pipeline", "2 stages work on 1 micro-batches"),
        (
            ["parallel.pipeline=2", "parallel.schedule=interleaved", "model.layers=4", "train.global_batch=10", "train.micro_batch=2"],
            "parallel.microbatches",
            "near 5 it takes 3, 4, 6",
        ),
        (["parallel.pipeline=2", "parallel.schedule=dualpipev", "model.layers=4", "train.micro_batch=4"], "parallel.microbatches", "4, or more"),
        (["parallel.pipeline=2", "parallel.stages=[2,1]"], "parallel.stages", "For instance [1, 1]"),
        (["parallel.pipeline=2", "parallel.schedule=zbv", "parallel.stages_per_rank=3"], "parallel.stages_per_rank", "zbv has 2"),
        (["parallel.pipeline=2", "parallel.gather=never"], "parallel.gather", "Use auto, action, run, step"),
        (["parallel.reduce_every=0"], "parallel.reduce_every", "Use 1 or more"),
    ],
)  # fmt: skip
def test_refusals(overrides, key, text):
    problems = planned("parallel.data=1", *overrides)[0].problems
    assert any(p.key == key and text in f"{p.reason} {p.remedy}" for p in problems), problems


def test_every_schedule_can_be_asked_for():
    for name in STAGES:
        plan = planned(
            "model.layers=4", "parallel.data=1", "parallel.pipeline=2", f"parallel.schedule={name}", "train.micro_batch=1"
        )[0]
        assert not plan.problems and plan.plan.schedule.name == name and plan.plan.schedule.in_flight


def test_the_plan_states_what_longer_gathers_and_rarer_reductions_keep():
    def working(*overrides):
        layout = ("model.layers=8", "parallel.pipeline=2", "parallel.data=2", "+strategy=zero3", "train.micro_batch=1")
        plan = planned(*layout, *overrides)[0]
        assert not plan.problems
        return {c.what: c.bytes for c in plan.costs if c.category == "working"}

    by_gather = [
        working(f"parallel.gather={g}", "parallel.schedule=interleaved")["weights gathered"] for g in ("action", "run", "step")
    ]
    assert by_gather == sorted(set(by_gather))
    rare, often = (working(f"parallel.reduce_every={n}")["gradients being reduced"] for n in (4, 1))
    assert rare > often
    (line,) = planned("model.layers=4", "parallel.data=1", "parallel.pipeline=2", "parallel.schedule=zbv", "parallel.gather=action",
                      "train.micro_batch=1")[0].manifest.differences()  # fmt: skip
    assert (line.key, line.got) == ("parallel.gather", "run")
