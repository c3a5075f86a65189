"""Weights are gathered ahead in the order really seen, stay where they are needed again soon, and never take more than the bound."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import gather_runs
from gather_runs import BLOCK, BLOCKS, ROOT
from pool import run_ranks

from partita.state.order import SeenOrder
from partita.state.units import find_units

STRAIGHT, BACK, SOME, TWICE = (0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (4, 2, 0), (0, 1, 2, 1, 3)


def test_gathers_follow_what_the_model_does() -> None:
    """Every path is learned from one pass, a path that changes costs gathers but no result, and bytes keep their bound."""
    drops = [STRAIGHT, (0, 2, 3, 4), STRAIGHT, (0, 1, 4), BACK, SOME]
    steady = [(path, prefetch) for prefetch in (1, 2) for path in (STRAIGHT, BACK, SOME, TWICE)]
    cases = [([path] * 3, 2, prefetch, None, False) for path, prefetch in steady]
    cases += [(drops, 2, 1, None, True), (drops, 1, 2, ROOT + BLOCK, True), ([TWICE] * 3, 2, 0, None, False)]
    cases += [([BACK] * 3, 2, 3, ROOT + 2 * BLOCK, False)]
    stays = ([STRAIGHT] * 3, 2, 1, None, False, "gradients")
    got = run_ranks(2, gather_runs.all_cases, [*cases, stays], timeout=60)
    for found, _, _ in [rank.pop() for rank in got]:
        assert [late for _, late, _ in found] == [0, 0, 0], "weights that stay whole are gathered ahead too, after each update"
    for number, (paths, micro, prefetch, limit, _) in enumerate(cases):
        weights = gather_runs.by_hand(paths, micro, 2)
        for rank in range(2):
            found, own, order = got[rank][number]
            assert found == got[0][number][0], "ranks gather alike"
            for name, value in weights.items():
                torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-7)
        peaks = [peak for _, _, peak in found]
        bound = limit or ROOT + (prefetch + 1) * BLOCK
        assert max(peaks[1:] if paths[0] == paths[1] and not limit else peaks) <= bound, (number, peaks)
        if number < len(steady):
            gathers, late, _ = found[-1]
            path, used = paths[0], len(set(paths[0]))
            assert late == 0, (path, prefetch, found)
            assert order[0] == f"blocks.{path[-1]}" if path is not TWICE else order[0] == "blocks.3"
            if path is not TWICE:  # those at the ends of passes stay whole
                stay = min(prefetch + 1, used)
                assert gathers == 1 + used + micro * (used - stay) + (micro - 1) * (used - stay), (path, prefetch, found)


def test_order_expects_what_was_seen() -> None:
    order = SeenOrder(3)
    assert order.first() == [0]
    for use in (2, 0, ~0, ~2):
        order.meet(use)
    order.end()
    assert order.first() == [2]
    assert order.meet(2) == ()
    assert order.ahead(2) == [0]
    assert order.keeps(2, 2)
    assert not order.keeps(2, 1)
    assert not order.keeps(1, 9)
    assert order.meet(~0) == [0], "a use that was left out"
    assert order.meet(1) == (), "what was never seen"
    assert order.ahead(3) == [], "nothing is known then"
    order.meet(~2)
    assert order.ahead(1) == []
    order.wraps = True
    assert order.ahead(2) == [0, 1], "the next pass is like this one"


class Holder(nn.Module):
    """Any modules by name."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Cell(nn.Module):
    """A block with a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_units(model)]


def test_units_of_models_of_many_kinds() -> None:
    def linears(n: int) -> list[nn.Module]:
        return [nn.Linear(8, 8) for _ in range(n)]

    shared = nn.Linear(8, 8)
    stack = nn.Sequential(nn.Embedding(9, 8), nn.Sequential(*linears(3), nn.LayerNorm(8)), nn.Linear(8, 9))
    big = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 128))
    found = {
        "one block": names(Holder(layers=nn.ModuleList(linears(1)), head=nn.Linear(8, 9))),
        "blocks with lists inside": names(Holder(layers=nn.ModuleList(Cell() for _ in range(2)))),
        "encoder and decoder": names(Holder(a=nn.ModuleList(linears(2)), b=nn.ModuleList(linears(3)))),
        "other lists": names(Holder(a=nn.ModuleList(linears(3)), b=nn.ModuleList([nn.LayerNorm(8)]))),
        "experts": names(Holder(layers=nn.ModuleList([Holder(gate=nn.Linear(8, 2), experts=nn.ModuleList(linears(4)))]))),
        "one block many times": names(Holder(layers=nn.ModuleList([shared] * 4))),
        "sequentials": names(stack),
        "small members": names(big),
        "no structure": names(Holder(a=nn.Linear(8, 8))),
        "nothing trained": names(nn.Sequential(OrderedDict(a=nn.Tanh()))),
    }
    assert found == {
        "one block": ["layers.0"],
        "blocks with lists inside": ["layers.0", "layers.1"],
        "encoder and decoder": ["a.0", "a.1", "b.0", "b.1", "b.2"],
        "other lists": ["a.0", "a.1", "a.2"],
        "experts": ["layers.0"],
        "one block many times": ["layers.0"],
        "sequentials": ["1.0", "1.1", "1.2", "1.3"],
        "small members": ["0", "3"],
        "no structure": [],
        "nothing trained": [],
    }
    assert len(names(gather_runs.Wanderer())) == BLOCKS
