"""The order of samples: permutations, layouts, resuming."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.sampler import SORTED, Order, _walk, permute, share

sizes = st.integers(1, 300)
seeds = st.integers(-(2**70), 2**70)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 50))
def test_every_epoch_has_each_sample_once(size, seed, epoch):
    order = Order(size, seed).indices(epoch * size, size)
    assert sorted(order.tolist()) == list(range(size))


@given(size=sizes, seed=seeds, first=st.integers(0, 2000), count=st.integers(0, 700), cut=st.integers(0, 700))
def test_any_range_is_a_window_of_one_endless_order(size, seed, first, count, cut):
    cut = min(cut, count)
    whole = Order(size, seed).indices(0, first + count)
    fresh = Order(size, seed)
    parts = [fresh.indices(first, cut), fresh.indices(first + cut, count - cut)]
    assert np.concatenate(parts).tolist() == whole[first : first + count].tolist()


@given(size=st.integers(1, 5000), secret=st.integers(0, 2**64 - 1))
@settings(max_examples=40)
def test_the_cipher_is_a_permutation_of_every_size(size, secret):
    assert np.array_equal(np.sort(_walk(np.arange(size), size, secret)), np.arange(size))


def test_a_huge_set_costs_no_memory_and_repeats_nothing():
    size = 10**12 + 7
    order = Order(size, seed=3)
    drawn = np.concatenate([order.indices(first, 5000) for first in (0, 5000, size // 2, size - 5000)])
    assert drawn.min() >= 0 and drawn.max() < size
    assert len(np.unique(drawn)) == drawn.size
    assert abs(drawn.mean() / size - 0.5) < 0.02


@pytest.mark.parametrize("size", [7, 1000, SORTED, SORTED + 1])
def test_seeds_and_epochs_give_other_orders_of_uniform_look(size):
    base = permute(np.arange(size), size, 0, 0)
    for other in (permute(np.arange(size), size, 0, 1), permute(np.arange(size), size, 1, 0)):
        assert not np.array_equal(base, other)
    if size >= 1000:  # neighbours are unrelated: their mean distance is a third of the range
        assert abs(np.abs(np.diff(base)).mean() / size - 1 / 3) < 0.03


def test_small_sets_have_uniform_permutations():
    counts = np.zeros((3, 3))
    for epoch in range(1200):
        counts[np.arange(3), Order(3, 5).indices(3 * epoch, 3)] += 1
    assert np.abs(counts - 400).max() < 90  # 5.5 standard deviations


def test_the_order_is_fixed_for_good():
    """A checkpoint of any version must continue with the same samples: these numbers may never change."""
    assert Order(10, 0).indices(0, 10).tolist() == [2, 6, 9, 3, 1, 7, 8, 0, 5, 4]
    assert Order(10**6, 1).indices(10**6 - 3, 6).tolist() == [236998, 163539, 159851, 271914, 672811, 282740]


def test_without_shuffle_samples_come_in_turn():
    assert Order(4, 0, shuffle=False).indices(2, 8).tolist() == [2, 3, 0, 1, 2, 3, 0, 1]


@given(total=st.integers(0, 100), size=st.integers(1, 9))
def test_shares_tile_the_whole_and_are_even(total, size):
    parts = [share(total, rank, size) for rank in range(size)]
    assert parts[0][0] == 0 and parts[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    lengths = [high - low for low, high in parts]
    assert max(lengths) - min(lengths) <= 1
