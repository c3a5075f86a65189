"""The order of transforms: constraints hold, ties are stable, contradictions name everyone who has a part in them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import PluginError
from partita.plugin.ordering import ANCHORS, sort_transforms
from partita.plugin.types import Transform


def make(name: str, after: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> Transform:
    return Transform(name, lambda model, context: model, after, before)


def names(*transforms: Transform) -> list[str]:
    return [t.name for t in sort_transforms(transforms)]


def test_anchors_come_in_their_order():
    assert names(*map(make, sorted(ANCHORS))) == list(ANCHORS)


def test_a_transform_without_wishes_stands_with_the_adapters():
    assert names(*map(make, ("recompute", "own", "expert_parallel", "adapter"))) == [
        "expert_parallel",
        "adapter",
        "own",
        "recompute",
    ]


def test_absent_anchors_still_order():
    assert names(make("x", after=("compile",)), make("y", before=("compile",)), make("z", after=("stage_split",))) == [
        "z",
        "y",
        "x",
    ]


def test_names_that_nobody_has_count_for_nothing():
    assert names(make("b", after=("absent",)), make("a", before=("gone",))) == ["a", "b"]


def test_ties_go_by_name():
    assert names(*map(make, "dbca")) == list("abcd")


def test_wishes_about_other_transforms():
    assert names(make("a", after=("b",)), make("b", after=("c",)), make("c")) == ["c", "b", "a"]


def test_a_conflict_names_both_owners():
    both = [make("lora", before=("quantize",)), make("quantize", before=("lora",))]
    with pytest.raises(PluginError) as caught:
        sort_transforms(both, {"lora": "peft", "quantize": "bits"})
    text = str(caught.value)
    assert "lora before quantize (plug-in 'peft')" in text and "quantize before lora (plug-in 'bits')" in text
    assert "plugins.block" in text


def test_a_cycle_shows_its_whole_way():
    ring = [make("a", after=("c",)), make("b", after=("a",)), make("c", after=("b",)), make("d", after=("a",))]
    with pytest.raises(PluginError) as caught:
        sort_transforms(ring, {"a": "A", "b": "B", "c": "C", "d": "D"})
    text = str(caught.value)
    assert "a before b (plug-in 'B'); b before c (plug-in 'C'); c before a (plug-in 'A')" in text
    assert "'D'" not in text


def test_against_the_usual_order():
    with pytest.raises(PluginError) as caught:
        sort_transforms([make("x", after=("state",), before=("compile",))], {"x": "theirs"})
    text = str(caught.value)
    assert "compile before state (the usual order)" in text and "plug-in 'theirs'" in text


def test_after_itself():
    with pytest.raises(PluginError, match="x before x"):
        sort_transforms([make("x", after=("x",))])


def test_twins():
    with pytest.raises(PluginError, match="two transforms have the name 'x'"):
        sort_transforms([make("x"), make("x")])


@st.composite
def possible(draw: st.DrawFn) -> list[Transform]:
    """Transforms whose wishes agree with a hidden order that keeps the anchors in theirs."""
    own = draw(st.lists(st.sampled_from([f"t{i}" for i in range(8)]), unique=True))
    hidden = list(ANCHORS)
    for name in own:
        hidden.insert(draw(st.integers(0, len(hidden))), name)
    chosen = [n for n in hidden if n in own or draw(st.booleans())]

    def wishes(name: str, others: list[str]) -> tuple[str, ...]:
        return tuple(draw(st.lists(st.sampled_from(others), unique=True, max_size=3))) if others else ()

    return [make(n, wishes(n, hidden[: hidden.index(n)]), wishes(n, hidden[hidden.index(n) + 1 :])) for n in chosen]


@given(possible(), st.randoms())
def test_any_wishes_that_can_be_met_are_met(transforms: list[Transform], order: random.Random):
    expected = names(*transforms)
    shuffled = list(transforms)
    order.shuffle(shuffled)
    assert names(*shuffled) == expected
    place = {name: i for i, name in enumerate(expected)}
    assert sorted(place) == sorted(t.name for t in transforms)
    for t in transforms:
        assert all(place[o] < place[t.name] for o in t.after if o in place)
        assert all(place[t.name] < place[o] for o in t.before if o in place)
    anchors = [n for n in expected if n in ANCHORS]
    assert anchors == sorted(anchors, key=ANCHORS.index)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), max_size=12))
def test_either_an_order_or_a_true_cycle(pairs: list[tuple[str, str]]):
    """Any wishes at all: the result keeps them, or the message shows a closed way made of wishes that were given."""
    transforms = [make(n, after=tuple(sorted({a for a, b in pairs if b == n}))) for n in "abcdef"]
    try:
        order = names(*transforms)
    except PluginError as error:
        steps = str(error).split("ordered: ")[1].split("\n")[0].split("; ")
        ways = [tuple(s.split(" (")[0].split(" before ")) for s in steps]
        assert all(w in pairs for w in ways)
        assert all(a[1] == b[0] for a, b in zip(ways, [*ways[1:], ways[0]]))
    else:
        assert all(order.index(a) < order.index(b) for a, b in pairs)
