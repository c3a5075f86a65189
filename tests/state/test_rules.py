"""Each update rule under every placement against plain per-tensor code that shares nothing with the framework."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import rule_runs
from pool import run_ranks
from rule_runs import STEPS

PLACES = [
    ("replicated", 1, 1),
    ("optimizer", 2, 1),
    ("gradients", 4, 1),
    ("parameters", 2, 1),
    ("parameters", 4, 1),
    ("hpz", 4, 2),
]


def plain_lion(p, g, s, step, lr, decay):
    m = s.setdefault("m", torch.zeros_like(p))
    p.mul_(1 - lr * decay).sub_(lr * torch.sign(0.9 * m + 0.1 * g))
    m.mul_(0.99).add_(g, alpha=0.01)


def plain_lamb(p, g, s, step, lr, decay):
    m, v = s.setdefault("m", torch.zeros_like(p)), s.setdefault("v", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).add_(g * g, alpha=0.001)
    r = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + decay * p
    ratio = p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1.0
    p.sub_(lr * ratio * r)


def plain_muon(p, g, s, step, lr, decay):
    """Newton-Schulz by its definition: a x + b x x^T x + c x x^T x x^T x."""
    m = s.setdefault("m", torch.zeros_like(p))
    m.mul_(0.95).add_(g, alpha=0.05)
    x = 0.05 * g + 0.95 * m
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    p.mul_(1 - lr * decay).sub_(lr * 0.2 * math.sqrt(max(p.shape)) * x)


PLAIN = {"lion": plain_lion, "lamb": plain_lamb, "muon": plain_muon}


def torch_optimizer(name: str, groups: list[dict], lr: float) -> torch.optim.Optimizer:
    if name == "adagrad":
        return torch.optim.Adagrad(groups, lr=lr, eps=1e-10)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def reference(name: str, by_torch: bool) -> dict[str, torch.Tensor]:
    """Weights after STEPS updates on whole batches."""
    model = rule_runs.Net()
    config = rule_runs.config_of(name)
    adamw = [(n, p) for n, p in model.named_parameters() if name == "muon" and (p.ndim != 2 or "embed" in n)]
    mine = [(n, p) for n, p in model.named_parameters() if not any(p is q for _, q in adamw)]

    def groups(members):
        return [{"params": [p], "weight_decay": config.weight_decay if p.ndim > 1 else 0.0} for _, p in members]

    optimizers = [torch_optimizer("adamw", groups(adamw), config.lr)] if adamw else []
    if by_torch:
        optimizers.append(torch_optimizer(name, groups(mine), config.lr))
    states: dict[str, dict[str, torch.Tensor]] = {n: {} for n, _ in mine}
    for step in range(STEPS):
        model.zero_grad()
        rule_runs.loss(model, *rule_runs.batch(step, 0, 1)).backward()
        for o in optimizers:
            o.step()
        if not by_torch:
            with torch.no_grad():
                for n, p in mine:
                    PLAIN[name](p, p.grad, states[n], step + 1, config.lr, config.weight_decay if p.ndim > 1 else 0.0)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("placement", "world", "replicate"), PLACES)
@pytest.mark.parametrize("name", ["lion", "lamb", "muon", "adagrad", "adafactor"])
def test_rule_equals_plain_code(name: str, placement: str, world: int, replicate: int) -> None:
    expected = reference(name, by_torch=name not in PLAIN)
    for got in run_ranks(world, rule_runs.train, name, placement, replicate, timeout=60):
        for n, value in expected.items():
            torch.testing.assert_close(got[n], value, rtol=2e-5, atol=2e-6, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", ["adamw8bit", "bf16_adamw", "bf16_lion"])
def test_narrow_states_follow_the_wide_ones_whatever_the_layout(name: str) -> None:
    """Codes and random bits belong to elements, so the layout changes nothing; and the way is close to that of float32 states."""
    one = run_ranks(1, rule_runs.train, name, "replicated", 1, timeout=60)[0]
    for placement, world, replicate in PLACES[1:]:
        many = run_ranks(world, rule_runs.train, name, placement, replicate, timeout=60)[0]
        for n, value in one.items():
            torch.testing.assert_close(many[n], value, rtol=1e-4, atol=3e-4, msg=lambda m, n=n, p=placement: f"{n}, {p}: {m}")
    wide = run_ranks(1, rule_runs.train, {"bf16_lion": "lion"}.get(name, "adamw"), "replicated", 1, timeout=60)[0]
    start = dict(rule_runs.Net().named_parameters())
    for n, value in wide.items():
        moved = (value - start[n]).norm()
        assert (one[n] - value).norm() < 0.2 * moved, n
    assert any(not torch.equal(one[n], value) for n, value in wide.items()), "the states were wide"


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw8bit", "lamb", "bf16_adamw"])
def test_states_go_on_in_another_layout(name: str) -> None:
    """Half the updates on 2 ranks, the other half on 4 under another placement."""
    whole = run_ranks(1, rule_runs.train, name, "replicated", 1, timeout=60)[0]
    saved = run_ranks(2, rule_runs.first_half, name, "optimizer", timeout=60)
    for got in run_ranks(4, rule_runs.second_half, name, "parameters", saved, timeout=60):
        for n, value in whole.items():
            torch.testing.assert_close(got[n], value, rtol=1e-4, atol=3e-4 if "8bit" in name or "bf16" in name else 1e-5)


@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw8bit", "bf16_adamw"])
def test_bytes_are_those_of_the_layout(name: str) -> None:
    for planned, allocated in run_ranks(4, rule_runs.memory, name, "parameters", timeout=60):
        assert allocated == planned


@pytest.mark.parametrize("world", [2, 4])
def test_weights_equal_those_of_fsdp2(world: int) -> None:
    expected = run_ranks(world, rule_runs.fsdp2, timeout=60)[0]
    stages = {p: run_ranks(world, rule_runs.like_fsdp2, p, timeout=60)[0] for p in ("optimizer", "gradients", "parameters")}
    for n, value in expected.items():
        torch.testing.assert_close(stages["parameters"][n], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")
        for got in stages.values():
            assert torch.equal(got[n], stages["parameters"][n]), "stages that sum in one order have the same bits"
