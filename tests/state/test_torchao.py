"""AdamW with torchao's states: the numbers of torchao's own optimizers, also for the last block of odd sizes; refused where it isn't installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import rule_runs
from pool import run_ranks

from partita.config.schema import OptimizerConfig
from partita.errors import ConfigError
from partita.state.optimizers import Update, formats_of
from partita.state.rules import torchao as rules

installed = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao isn't installed")


def make(bits):
    return getattr(rules, f"make_torchao_adamw{bits}bit")(OptimizerConfig(betas=[0.9, 0.99], eps=1e-6))


@installed
@pytest.mark.parametrize("bits", [8, 4])
def test_updates_are_those_of_torchao(bits):
    """Its function and its tensors, on a padded copy; ours in flat memory. float32 and bfloat16 gradients, two ranges, a factor."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    rule, kind = make(bits), OptimState8bit if bits == 8 else OptimState4bit
    sizes, formats = (1280 + 37, 256), formats_of(rule)
    weights = [torch.randn(n) for n in sizes]
    copies = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]
    states = {name: [torch.zeros(-(-n // f.block), dtype=getattr(torch, f.dtype)) for n in sizes] for name, f in formats.items()}
    theirs = [torch.nn.functional.pad(w, (0, -len(w) % 256)) for w in weights]
    moments = [
        [kind.zeros((len(t),), s, rules.block_of(bits), "cpu", dtype=torch.float32) for s in (True, False)] for t in theirs
    ]
    with torch.compiler.set_stance("force_eager"):
        for step in (1, 2, 3, 4):
            gradients = [torch.randn(n) * 10.0 ** -(torch.arange(n).remainder(5) + step) for n in sizes]  # smaller each time
            wide = [torch.nn.functional.pad(g * 0.5, (0, -len(g) % 256)) for g in gradients]
            rule.update(Update(weights, gradients, states, copies), step=step, lr=1e-2, weight_decay=0.1, scale=torch.tensor(0.5))
            for p, g, (m, v) in zip(theirs, wide, moments):
                at = torch.tensor(float(step)), m, v, None, torch.tensor(1e-2)
                single_param_adam(p, g, *at, 0.9, 0.99, 0.1, 1e-6, True, False)
    for i, n in enumerate(sizes):
        torch.testing.assert_close(weights[i], theirs[i][:n], rtol=1e-5, atol=1e-6)
        assert torch.equal(copies[i], weights[i].bfloat16())
        for name, moment in zip(rule.states(), moments[i]):
            ours = states[name][i]
            assert (ours != moment.codes[: len(ours)]).float().mean() < 0.01  # next to the middle of two values


@installed
@pytest.mark.parametrize("bits", [8, 4])
def test_layouts_train_alike(bits):
    """Odd sizes, replicated and cut; and not far from float32 states."""
    name = f"torchao_adamw{bits}bit"
    one = run_ranks(1, rule_runs.train_eagerly, name, "replicated", 1, timeout=60)[0]
    many = run_ranks(2, rule_runs.train_eagerly, name, "parameters", 1, timeout=60)[0]
    wide = run_ranks(1, rule_runs.train, "adamw", "replicated", 1, timeout=60)[0]
    start = dict(rule_runs.Net().named_parameters())
    for n, value in wide.items():
        moved = (value - start[n]).norm()
        assert (many[n] - one[n]).norm() < (0.02 if bits == 8 else 0.1) * moved, n  # sums in another order change some codes
        assert (one[n] - value).norm() < (0.2 if bits == 8 else 0.5) * moved, n


@installed
def test_bytes_are_those_that_the_name_promises():
    assert [sum(torch.empty(0, dtype=getattr(torch, s.dtype)).element_size() / s.block for s in formats_of(make(b)).values()) for b in (8, 4)] == [
        pytest.approx(2 * (b / 8 + 4 / rules.block_of(b))) for b in (8, 4)
    ]  # fmt: skip


def test_without_torchao_the_remedy_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for bits in (8, 4):
        with pytest.raises(ConfigError, match=rf"(?s)torchao_adamw{bits}bit: torchao isn't installed.*partita\[torchao\]"):
            make(bits)
