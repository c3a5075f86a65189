"""Documents, positions, labels, masks, and the whole way from a config to batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.corpus import Corpus, make_stdlib, make_synthetic, make_tokens
from partita.data.make import make_data
from partita.data.masking import make_masking
from partita.data.packing import IGNORED, Cutter, restart
from partita.data.tokenizer import BytesTokenizer, IdsTokenizer
from partita.errors import ConfigError, PartitaError
from partita.plan.plan import Schedule

BYTES = BytesTokenizer()
END = BYTES.eos


def slow_documents(tokens: list[int], starts: list[int], first: int, sequence: int):
    """Documents, positions and labels of one sample, token by token."""
    documents, positions, labels = [], [], []
    for place in range(first, first + sequence):
        number = sum(s <= place for s in starts) - 1
        documents.append(number - (sum(s <= first for s in starts) - 1))
        positions.append(place - max(starts[number], first))
        labels.append(IGNORED if place + 1 in starts else tokens[place + 1])
    return documents, positions, labels


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), sequence=st.integers(1, 8), by_index=st.booleans())
@settings(deadline=None)
def test_packing_against_a_loop_over_tokens(lengths, sequence, by_index):
    tokens = [t for i, n in enumerate(lengths) for t in [*[i] * (n - 1), END]]
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    corpus = Corpus(np.array(tokens, np.uint16), np.array(starts) if by_index else None, "test", "x")
    cutter = Cutter(corpus, BYTES, sequence, 260, pack=True)
    assert len(cutter) == (len(tokens) - 1) // sequence
    if not len(cutter):
        return
    batch = cutter.batch(np.arange(len(cutter)), np.arange(len(cutter)))
    for row in range(len(cutter)):
        documents, positions, labels = slow_documents(tokens, starts, row * sequence, sequence)
        assert batch["documents"][row].tolist() == documents
        assert batch["positions"][row].tolist() == positions
        assert batch["labels"][row].tolist() == labels


def test_empty_samples_have_documents_too():
    corpus = Corpus(np.arange(20, dtype=np.uint16), np.array([0, 7]), "test", "x")
    batch = Cutter(corpus, BYTES, 4, 260, pack=True).batch(np.array([1, -1]), np.array([5, -1]))
    assert batch["documents"][0].tolist() == [0, 0, 0, 1] and batch["documents"].shape == (2, 4)
    assert (batch["labels"][1] == IGNORED).all() and batch["input_ids"][1].tolist() == [END] * 4
    assert batch["positions"].dtype == torch.int64


def test_ignored_labels_leave_the_inputs_alone():
    """Also where a batch is one row, of which every slice is contiguous."""
    corpus = Corpus(np.arange(18, dtype=np.uint16), np.array([0, 7]), "test", "x")
    cutter = Cutter(corpus, BYTES, 8, 260, pack=True, whole=False)
    for rows in ([0], [1], [2], [0, 1, 2]):
        batch = cutter.batch(np.array(rows), np.array(rows))
        for row, index in enumerate(rows):
            part = np.arange(18)[index * 8 : index * 8 + 8].tolist()
            assert batch["input_ids"][row].tolist() == part + [END] * (8 - len(part))


def test_restart():
    assert restart(np.array([[0, 0, 1, 1, 1, 2]])).tolist() == [[0, 1, 0, 1, 2, 0]]


def test_ids_outside_the_vocabulary_are_named():
    corpus = Corpus(np.array([1, 2, 300, 4, 5], np.int32), None, "some/file.bin", "x")
    for tokens, bad in (([1, 2, 300, 4, 5], 300), ([1, -2, 3, 4, 5], -2)):
        corpus = Corpus(np.array(tokens, np.int32), None, "some/file.bin", "x")
        with pytest.raises(PartitaError, match=rf"some/file\.bin holds the token id {bad}, outside the vocabulary of 260"):
            Cutter(corpus, BYTES, 4, 260).batch(np.array([0]), np.array([0]))


# ------------------------------------------------------------------ masks


def test_shares_of_masked_replaced_and_kept_tokens():
    masking = make_masking(0.15, BYTES, 0, "train", 260)
    tokens = np.random.default_rng(0).integers(0, 256, (400, 250))
    tokens[:, 0] = END
    inputs, labels = masking.apply(tokens, np.ones_like(tokens, bool), np.arange(400))
    chosen = labels != IGNORED
    assert not chosen[:, 0].any() and np.array_equal(labels[chosen], tokens[chosen])
    assert np.array_equal(inputs[~chosen], tokens[~chosen])
    assert abs(chosen[:, 1:].mean() - 0.15) < 0.005
    masked = (inputs == BYTES.mask)[chosen].mean()
    kept = (inputs == tokens)[chosen].mean()
    assert abs(masked - 0.8) < 0.01 and abs(kept - 0.1) < 0.01
    assert not np.isin(inputs[chosen], [256, 258, 259]).any()


def test_masks_follow_the_sample_and_not_its_neighbours():
    masking = make_masking(0.3, BYTES, 0, "train", 260)
    tokens, present = np.tile(np.arange(40), (4, 1)), np.ones((4, 40), bool)
    whole = masking.apply(tokens, present, np.array([7, 8, 9, 7 + 2**40]))
    alone = masking.apply(tokens[:1], present[:1], np.array([9]))
    assert np.array_equal(whole[0][2], alone[0][0]) and np.array_equal(whole[1][2], alone[1][0])
    assert len({row.tobytes() for row in whole[1]}) == 4


def test_every_row_with_a_word_has_a_label():
    masking = make_masking(0.01, BYTES, 0, "train", 260)
    tokens = np.array([[1, 2], [END, 3], [END, END]])
    _, labels = masking.apply(tokens, np.array([[True, True], [True, True], [True, True]]), np.arange(3))
    assert (labels != IGNORED).sum(axis=1).tolist() == [1, 1, 0] and labels[1].tolist() == [IGNORED, 3]


def test_masking_refuses():
    with pytest.raises(ConfigError, match="mask token"):
        make_masking(0.15, IdsTokenizer(9), 0, "train", 9)
    with pytest.raises(ConfigError, match=r"data\.mask: 0"):
        make_masking(0.0, BYTES, 0, "train", 260)


# ------------------------------------------------------------------ from a config


def test_a_masked_model_on_the_standard_library(config):
    made = config(limit=50_000, sequence=32)
    data = make_data(made, Schedule(4, 2, 2), 0, 1, BYTES, make_stdlib, "masked")
    assert data.tokens["step"] == 128 and data.epoch(1) == pytest.approx(4 / data.samples["train"])
    batches = data.step(1)
    assert all(((b["labels"] != IGNORED).sum(1) > 0).all() for b in batches)
    first, again = (list(data.evaluation()) for _ in range(2))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("options", "objective", "message"),
    [
        ({"sequence": 0}, "causal", r"data\.sequence=0"),
        ({"workers": -1}, "causal", r"data\.workers=-1"),
        ({}, "prefix", "partita_loss is 'prefix'"),
        ({"sequence": 5000, "limit": 3000}, "causal", r"tokens for training,.*fewer than one sample of 5001"),
    ],
)
def test_mistakes(config, options, objective, message):
    with pytest.raises(PartitaError, match=message):
        make_data(config(name="synthetic", **options), Schedule(2, 2, 1), 0, 1, BYTES, make_synthetic, objective)


def test_packing_needs_ends_or_an_index():
    with pytest.raises(ConfigError, match=r"data\.pack: nothing tells where the documents of f end"):
        Cutter(Corpus(np.arange(9), None, "f", "x"), IdsTokenizer(260), 4, 260, pack=True)


def test_no_validation_means_no_batches(tmp_path, config):
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "t.bin")
    made = config(name="tokens", path=str(tmp_path / "t.bin"), sequence=8, validation=0.0)
    data = make_data(made, Schedule(2, 2, 1), 0, 1, BYTES, make_tokens)
    assert data.samples == {"train": 7, "validation": 0} and list(data.evaluation()) == []
    assert not data.has_evaluation
