"""Micro-batches, layouts, evaluation on uneven ranks, resume, prefetching."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.packing import IGNORED
from partita.data.prefetch import Prefetch
from partita.errors import CheckpointError, PartitaError
from partita.plan.plan import Schedule


def collect(batches) -> dict[int, tuple]:
    """Global sample number -> (inputs, labels) of the samples that are there; each number at most once."""
    seen: dict[int, tuple] = {}
    for batch in batches:
        for row, number in enumerate(batch["sample"].tolist()):
            if number < 0:
                assert (batch["labels"][row] == IGNORED).all()
                continue
            assert number not in seen
            seen[number] = (batch["input_ids"][row].tolist(), batch["labels"][row].tolist())
    return seen


def all_ranks(data_of, samples: int, global_batch: int, micro: int, size: int, step: int, **options) -> dict[int, tuple]:
    widest = -(-global_batch // size)
    schedule = Schedule(global_batch, micro, -(-widest // micro))
    batches = [b for rank in range(size) for b in data_of(samples, schedule, rank, size, **options).step(step)]
    assert {tuple(b["input_ids"].shape) for b in batches} == {(micro, 4)}
    return collect(batches)


@given(
    samples=st.integers(1, 40),
    global_batch=st.integers(1, 24),
    micro=st.integers(1, 8),
    size=st.integers(1, 5),
    step=st.integers(1, 20),
    masked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_an_update_is_the_same_in_every_layout(data_of, samples, global_batch, micro, size, step, masked):
    reference = all_ranks(data_of, samples, global_batch, global_batch, 1, step, masked=masked)
    assert sorted(reference) == list(range((step - 1) * global_batch, step * global_batch))
    assert all_ranks(data_of, samples, global_batch, micro, size, step, masked=masked) == reference


def test_labels_are_the_next_tokens(data_of):
    batch = data_of(6, Schedule(3, 3, 1)).step(1)[0]
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["sample"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert batch["input_ids"].is_contiguous() and batch["labels"].is_contiguous()
    assert "documents" not in batch


def test_resuming_in_a_later_epoch_continues_its_order(data_of):
    """10 samples, 2 ranks, batch 1, stopped in epoch 1 after 2 updates."""
    schedule = Schedule(2, 1, 1)

    def firsts(steps) -> list[int]:
        ranks = [data_of(10, schedule, rank, 2) for rank in range(2)]
        return [data.step(step)[0]["input_ids"][0, 0].item() // 4 for step in steps for data in ranks]

    whole = firsts(range(1, 16))
    assert firsts(range(1, 8)) + firsts(range(8, 16)) == whole
    epochs = [whole[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("size", [2, 8])
def test_resuming_with_other_ranks_sees_the_rest_once(data_of, size):
    """16 samples; 8 are used on 4 ranks, the rest on 2 or 8."""
    used = all_ranks(data_of, 16, 8, 2, 4, 1)
    rest = all_ranks(data_of, 16, 8, -(-8 // size), size, 2)
    firsts = [row[0][0] // 4 for row in (*used.values(), *rest.values())]
    assert sorted(firsts) == list(range(16))


def test_what_changes_the_order_is_refused_on_resume(data_of):
    saved = data_of(16, Schedule(8, 2, 1), 0, 4).state()
    data_of(16, Schedule(8, 4, 1), 1, 2).check(saved)
    with pytest.raises(CheckpointError, match=r"train.global_batch: 8 when saved, 4 now"):
        data_of(16, Schedule(4, 4, 1)).check(saved)
    with pytest.raises(CheckpointError, match="seed: 0 when saved, 1 now"):
        data_of(16, Schedule(8, 8, 1), seed=1).check(saved)


def test_a_plan_that_cannot_hold_the_batch_is_refused(data_of):
    with pytest.raises(PartitaError, match=r"train\.global_batch: 9 sequences over 2 data ranks are up to 5"):
        data_of(16, Schedule(9, 2, 2), 0, 2)
    with pytest.raises(PartitaError, match="counted from 1"):
        data_of(16, Schedule(2, 2, 1)).step(0)
    with pytest.raises(PartitaError, match="data rank 2 of 2"):
        data_of(16, Schedule(2, 2, 1), 2, 2)


# ------------------------------------------------------------------ evaluation


@given(held=st.integers(0, 30), size=st.integers(1, 5), micro=st.integers(1, 4), batches=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_evaluation_sees_each_sample_once_and_all_ranks_equally_often(data_of, held, size, micro, batches):
    parts = [list(data_of(9, Schedule(6, micro, 6), r, size, held=held).evaluation(batches)) for r in range(size)]
    assert len({len(part) for part in parts}) == 1
    expected = min(held, batches * 6) if batches else held
    assert sorted(collect(b for part in parts for b in part)) == list(range(expected))


def test_five_samples_on_two_ranks(data_of):
    """Batch 1: one rank has 3 batches, the other 2 and an empty one; the sums are those of one process."""

    def sums(size: int) -> tuple[int, int]:
        total = count = 0
        for rank in range(size):
            for batch in data_of(9, Schedule(2, 1, 2), rank, size, held=5).evaluation():
                keep = batch["labels"] != IGNORED
                total, count = total + int(batch["labels"][keep].sum()), count + int(keep.sum())
        return total, count

    assert sums(2) == sums(1) == sums(3)
    assert sums(2)[1] == 5 * 4


def test_metrics_count_ten_samples_on_two_and_three_ranks(data_of):
    """Labels i mod 2, predictions always 1, batch 3: accuracy 0.5 over exactly 10 samples."""
    for size in (2, 3):
        seen = [n for r in range(size) for n in collect(data_of(9, Schedule(9, 3, 3), r, size, held=10).evaluation())]
        assert len(seen) == 10 and sum(n % 2 for n in seen) / len(seen) == 0.5


def test_the_last_validation_sample_may_be_short(data_of):
    data = data_of(9, Schedule(2, 2, 1), held=2)
    data = type(data)(data.train, data.validation, data.order, data.schedule, data.share)
    short = data.validation.corpus.part(0, 7)
    cutter = type(data.validation)(short, data.train.tokenizer, 4, 260, whole=False)
    assert len(cutter) == 2
    labels = cutter.batch(*(torch.arange(2).numpy(),) * 2)["labels"]
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, IGNORED, IGNORED]]


def test_evaluation_leaves_training_as_it_was(data_of):
    data = data_of(9, Schedule(2, 2, 1), held=5)
    before = data.step(3)[0]["input_ids"]
    list(data.evaluation())
    assert torch.equal(before, data.step(3)[0]["input_ids"])


# ------------------------------------------------------------------ prefetching


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetching_changes_nothing(data_of, threads):
    data = data_of(16, Schedule(4, 2, 2), threads=threads)
    with data.iterate(3, 9) as ahead:
        steps = list(ahead)
    assert [step for step, _ in steps] == list(range(3, 10))
    for step, batches in steps:
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, data.step(step), strict=True))


def data_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("partita-data")]


def test_closing_ends_the_threads(data_of):
    before = len(data_threads())
    ahead = data_of(16, Schedule(4, 2, 2), threads=2).iterate(1)
    next(ahead)
    assert len(data_threads()) > before
    ahead.close()
    ahead.close()
    assert len(data_threads()) == before
    assert list(ahead) == []


def test_closing_the_data_ends_all_threads(data_of):
    before = len(data_threads())
    data = data_of(16, Schedule(4, 2, 2), threads=2)
    for _ in range(2):
        next(data.iterate(1))
    data.close()
    data.close()
    assert len(data_threads()) == before


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_arrives_at_its_step_and_ends_the_threads(threads):
    def make(n: int) -> int:
        if n == 3:
            raise PartitaError("step 3 is broken")
        return n

    before = len(data_threads())
    ahead = Prefetch(make, 1, None, threads)
    assert [next(ahead), next(ahead)] == [(1, 1), (2, 2)]
    with pytest.raises(PartitaError, match="step 3"):
        next(ahead)
    ahead.close()
    assert len(data_threads()) == before


def test_work_is_done_ahead_of_its_use():
    made = {n: threading.Event() for n in range(1, 20)}

    def make(n: int) -> int:
        made[n].set()
        return n

    with Prefetch(make, 1, 5) as ahead:
        assert next(ahead) == (1, 1)
        assert all(made[n].wait(10) for n in (2, 3)), "made before it is asked for"
