"""Learning-rate schedules: closed forms, edge values, and rules that hold for all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.config.schema import LrScheduleConfig
from partita.errors import ConfigError
from partita.train.schedules import SCHEDULES, check_schedule


def make(name: str, steps: int, **options):
    config = LrScheduleConfig(name=name, **options)
    return SCHEDULES[name](config, steps)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_warm_up_counts_updates(name):
    factor = make(name, 40, warmup=10, decay=5)
    assert [factor(k) for k in range(1, 11)] == pytest.approx([k / 10 for k in range(1, 11)])
    assert factor(5) == 0.5
    assert factor(10) == 1.0


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 0.25])
def test_last_update_has_the_minimum_exactly(name, warmup):
    factor = make(name, 10, warmup=warmup, minimum=0.1, decay=3)
    assert factor(10) == 0.1
    assert factor(11) == 0.1


def test_closed_forms():
    assert make("linear", 11, warmup=1, minimum=0.0)(6) == pytest.approx(0.5)
    assert make("cosine", 11, warmup=1, minimum=0.2)(6) == pytest.approx(0.6)
    assert make("cosine", 9, warmup=1, minimum=0.0)(3) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert make("inverse_sqrt", 100, warmup=4)(64) == 0.25
    assert make("constant", 5, warmup=0)(5) == 1.0


def test_wsd_is_flat_and_then_falls():
    factor = make("wsd", 100, warmup=10, decay=0.2, minimum=0.0)
    assert {factor(k) for k in range(10, 81)} == {1.0}
    assert factor(90) == pytest.approx(0.5)
    assert make("wsd", 10, warmup=0, decay=0)(10) == 1.0


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    steps=st.integers(1, 60),
    warmup=st.one_of(st.integers(0, 60), st.floats(0, 1, exclude_max=True)),
    decay=st.one_of(st.integers(0, 60), st.floats(0, 1, exclude_max=True)),
    minimum=st.floats(0, 1),
)
def test_every_accepted_schedule_stays_in_range_and_has_one_peak(name, steps, warmup, decay, minimum):
    config = LrScheduleConfig(name=name, warmup=warmup, decay=decay, minimum=minimum)
    if check_schedule(config, steps):
        with pytest.raises(ConfigError):
            SCHEDULES[name](config, steps)
        return
    factors = [SCHEDULES[name](config, steps)(k) for k in range(1, steps + 5)]
    assert all(math.isfinite(f) and 0.0 <= f <= 1.0 for f in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert all(b <= a + 1e-12 for a, b in zip(factors[top:], factors[top + 1 :]))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (2, 2), (1, 2), (0, 2), (10, 10)])
def test_edge_lengths(name, warmup, steps):
    factor = make(name, steps, warmup=warmup, decay=0)
    values = [factor(k) for k in range(1, steps + 1)]
    assert all(math.isfinite(v) for v in values)
    assert values[max(warmup, 1) - 1] == 1.0


def test_zero_warm_up_begins_at_the_peak():
    assert all(make(name, 10, warmup=0, decay=2)(1) == 1.0 for name in SCHEDULES)


@pytest.mark.parametrize(
    ("options", "key", "word"),
    [
        ({"warmup": 200}, "lr_schedule.warmup", "200"),
        ({"warmup": -1}, "lr_schedule.warmup", "-1"),
        ({"warmup": 1.0}, "lr_schedule.warmup", "share"),
        ({"warmup": float("nan")}, "lr_schedule.warmup", "nan"),
        ({"warmup": True}, "lr_schedule.warmup", "True"),
        ({"minimum": 1.5}, "lr_schedule.minimum", "1.5"),
        ({"minimum": float("nan")}, "lr_schedule.minimum", "nan"),
        ({"name": "wsd", "warmup": 60, "decay": 60}, "lr_schedule.decay", "train.steps=100"),
    ],
)
def test_mistakes_name_key_and_value(options, key, word):
    config = LrScheduleConfig(**options)
    with pytest.raises(ConfigError) as caught:
        SCHEDULES[config.name](config, 100)
    assert key in str(caught.value) and word in str(caught.value) and "->" in str(caught.value)
