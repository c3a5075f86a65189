"""Reference models with kernels and without: the same losses and gradients; kernels of others by config."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import VOCAB, build, spread

import partita_kernels
from partita.config.schema import KernelsConfig
from partita.errors import ConfigError
from partita.models import layers
from partita.plugin.registry import Registry
from partita.train.kernels import check_kernels, find, use_kernels
from partita.train.loss import token_cross_entropy


class Config:
    def __init__(self, **kernels):
        self.kernels = KernelsConfig(**kernels)


@pytest.fixture(autouse=True)
def as_before():
    yield
    use_kernels(Config(), None)


def losses(model, when, dtype, steps=5):
    """Of plain descent, which would show a wrong scale."""
    model = copy.deepcopy(model).to(dtype)
    generator = torch.Generator().manual_seed(1)
    layers.choose(when)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (3, 17), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, :5] = -100
        total, count = token_cross_entropy(model(ids[:, :-1]), labels, label_smoothing=0.1, z_loss=1e-3)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        found.append((total / count).item())
    norm = torch.cat([p.grad.flatten().float() for p in model.parameters()]).norm().item()
    return torch.tensor([*found, norm], dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("name", "options"), [("gpt", {}), ("llama", {"kv_heads": 2}), ("bert", {})])
def test_kernels_on_and_off(name, options, dtype, bound):
    model = spread(build(name, **options)).train()
    off, on = (losses(model, when, dtype) for when in ("never", "always"))
    assert not torch.equal(off, on) or dtype != torch.float32
    torch.testing.assert_close(on, off, rtol=bound, atol=0)


def test_kernels_are_in_the_compiled_graph():
    model = build("llama")
    layers.choose("always")
    ids = torch.randint(0, VOCAB, (2, 9))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, want = compiled(ids), model(ids)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (got, want)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def told(accelerator=True, registry=None, **kernels):
    return "\n".join(map(str, check_kernels(Config(**kernels), registry or Registry.load([]), accelerator)))


def test_unknown_choices_are_refused():
    text = told(layers="sometimes", tiles="best", replace={"nrom": "liger", "glu": "ligr", "route": "liger"})
    assert "kernels.layers: 'sometimes'" in text
    assert "kernels.tiles: 'best'" in text
    assert "did you mean 'norm'" in text
    assert "'liger'" in text
    assert "liger has no implementation of 'route'" in text
    assert "It has glu, glu_backward, norm" in text


class Provider:
    """A registry whose slot has one function for everything."""

    def __init__(self, accelerator=False):
        self.accelerator = accelerator

    def provide(self, slot, name):
        def seven(tensors):
            return torch.tensor(7.0)

        seven.accelerator = self.accelerator
        return lambda operation: seven


def test_choices_that_would_change_nothing_are_refused():
    assert "kernels.layers=auto on CPUs nothing calls 'norm'" in told(False, Provider(), replace={"norm": "mine"})
    assert "kernels.layers=never nothing calls 'glu'" in told(True, Provider(), layers="never", replace={"glu": "mine"})
    assert "no part of a run calls 'linear_cross_entropy'" in told(True, Provider(), replace={"linear_cross_entropy": "mine"})
    assert "'mine' needs an accelerator" in told(False, Provider(True), replace={"squared_norm": "mine"})
    for accelerator, when, operation in ((True, "auto", "norm"), (False, "always", "rope"), (False, "auto", "glu")):
        assert told(accelerator, Provider(), layers=when, replace={operation: "mine"}) == ""


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"pip install 'partita\[liger\]'"):
        find("glu", "liger", Registry.load([]))


def test_replacements_end_with_the_run():
    use_kernels(Config(replace={"squared_norm": "mine"}), Provider())
    assert partita_kernels.squared_norm([torch.ones(3)]).item() == 7.0
    use_kernels(Config(), None)
    assert partita_kernels.squared_norm([torch.ones(3)]).item() == pytest.approx(3.0, rel=1e-6)
