"""Update rules that say what travels, against their formulas, on one flat range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from partita.config.schema import OptimizerConfig
from partita.errors import ConfigError
from partita.state.optimizers import Rule, Update, formats_of
from partita.state.rules.lamb import Lamb
from partita_compression.rules.adam import FLOOR, OneBitAdam, ZeroOneAdam, make_onebit_adam, make_zero_one_adam, steady
from partita_compression.rules.lamb import OneBitLamb
from partita_compression.settings import Traffic, variance_update

N, LR, DECAY, B1, B2, EPS = 1500, 1e-2, 0.1, 0.9, 0.95, 1e-8
ONE = torch.ones(())


class Range:
    """A weight vector with the states of a rule."""

    def __init__(self, rule: Rule) -> None:
        torch.manual_seed(0)
        self.rule, self.p = rule, torch.randn(N)
        formats = formats_of(rule)
        self.states = {k: torch.zeros(math.prod(f.shape((N,)) if f.shape else (N,))) for k, f in formats.items()}

    def step(self, step: int, message: torch.Tensor) -> None:
        """One update with what has arrived."""
        states = {k: [v] for k, v in self.states.items()}
        update = Update([self.p], [message.clone()], states, [None], [0], [(N,)], [0], 1, lambda values: None)
        self.rule.update(update, step=step, lr=LR, weight_decay=DECAY, scale=ONE)


def gradients(step: int) -> torch.Tensor:
    """Of very different sizes; the last hundred have none at all."""
    g = torch.randn(N, generator=torch.Generator().manual_seed(step), dtype=torch.float64) * torch.logspace(-3, 0, N).double()
    g[-100:] = 0
    return g


def test_onebit_adam_is_its_formula() -> None:
    """Adam for 5 updates, then momentum over the frozen second moment, no element's of which is far below its block's mean."""
    run, freeze = Range(OneBitAdam(B1, B2, EPS, 5)), 5
    p, m, v = run.p.double().clone(), torch.zeros(N).double(), torch.zeros(N).double()
    for step in range(1, 13):
        g = gradients(step)
        m = B1 * m + (1 - B1) * g
        if step <= freeze:
            v = B2 * v + (1 - B2) * g * g
        if step == freeze + 1:
            means = torch.cat([v[:1024].mean().expand(1024), v[1024:].mean().expand(N - 1024)])
            v = torch.maximum(v, FLOOR * means)
        root = (v / (1 - B2 ** min(step, freeze))).sqrt() + EPS
        p = p * (1 - LR * DECAY) - LR * (m / (1 - B1**step)) / root
        run.step(step, (g if step <= freeze else m).float())
        torch.testing.assert_close(run.p.double(), p, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(run.states["exp_avg"].double(), m, rtol=1e-4, atol=1e-6)


def test_zero_one_adam_is_its_formula() -> None:
    run = Range(ZeroOneAdam(B1, B2, EPS, 12, 2))
    p, m, v = run.p.double().clone(), torch.zeros(N).double(), torch.zeros(N).double()
    seen, raised = 0, True
    for step in range(1, 20):
        g = gradients(step)
        m = B1 * m + (1 - B1) * g
        if step in (1, 2, 4, 6, 10):  # twice in each, twice in each second, twice in each fourth of which the freeze lets one
            v, seen, raised = B2 * v + (1 - B2) * g * g, seen + 1, False
        elif not raised:
            means = torch.cat([v[:1024].mean().expand(1024), v[1024:].mean().expand(N - 1024)])
            v, raised = torch.maximum(v, FLOOR * means), True
        p = p * (1 - LR * DECAY) - LR * (m / (1 - B1**step)) / ((v / (1 - B2**seen)).sqrt() + EPS)
        run.step(step, g.float())
        torch.testing.assert_close(run.p.double(), p, rtol=1e-5, atol=1e-6)


def test_onebit_lamb_is_its_formula() -> None:
    freeze, smoothing = 4, 0.9
    run, plain = Range(OneBitLamb(B1, B2, EPS, freeze)), Range(Lamb(B1, B2, EPS))
    average, last = 0.0, 1.0
    for step in range(1, 5):
        before, g = plain.p.double().clone(), gradients(step)
        plain.step(step, g.float())
        run.step(step, g.float())
        assert torch.equal(run.p, plain.p)
        m, v = plain.states["exp_avg"].double(), plain.states["exp_avg_sq"].double()
        direction = (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS) + DECAY * before
        average = smoothing * average + (1 - smoothing) * float(before.norm() / direction.norm())
    p, m = run.p.double().clone(), run.states["exp_avg"].double().clone()
    v = [run.states["exp_avg_sq"].clone()]
    steady(v)
    frozen, fresh = v[0].double(), v[0].double().clone()
    for step in range(5, 10):
        new = B1 * m + (1 - B1) * gradients(step) * 0.3
        g, m = (new - B1 * m) / (1 - B1), new
        fresh = B2 * fresh + (1 - B2) * g * g
        root, going = (frozen / (1 - B2**freeze)).sqrt() + EPS, (fresh / (1 - B2**step)).sqrt() + EPS
        moved = m / (1 - B1**step) / root
        direction = moved + DECAY * p
        share = min(1.0, float(moved.norm() / direction.norm()))
        factor = float((root / going).max()) * share + 1 - share
        last = min(max(min(max(factor, 0.5), 4.0), last * 0.9), last * 1.1)
        p = p - LR * average / (1 - smoothing**freeze) * last * direction
        run.step(step, new.float())
        torch.testing.assert_close(run.p.double(), p, rtol=1e-4, atol=1e-5)
        assert float(run.states["trust"][1]) == pytest.approx(last - 1, abs=1e-4)


def test_the_second_moment_changes_ever_more_rarely() -> None:
    changed = [step for step in range(1, 30) if variance_update(step, 4)[0]]
    assert changed == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28]
    assert [variance_update(step, 4)[1] for step in changed] == list(range(1, 13))
    traffic = Traffic(11, None, 4)
    assert [u for u in range(1, 30) if traffic.native(u)] == [1, 2, 3, 4, 6, 8, 10]
    assert all(Traffic(None).native(u) for u in (1, 10**6)) and not Traffic(3).native(4)


@pytest.mark.parametrize(
    ("options", "freeze"), [({"freeze_step": 7}, 7), ({"freeze_step": 0.25, "steps": 80}, 20), ({}, 100000), ({"freeze_step": 0}, 1)]
)  # fmt: skip
def test_the_freeze_is_a_number_of_updates_or_a_share(options: dict[str, Any], freeze: int) -> None:
    assert make_onebit_adam(OptimizerConfig(options=options)).freeze == freeze


@pytest.mark.parametrize("options", [{"var_freeze_step": 0.5}, {"var_freeze_step": "soon"}, {"var_update_scaler": -1}])
def test_options_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.options\.var_"):
        make_zero_one_adam(OptimizerConfig(options=options))
