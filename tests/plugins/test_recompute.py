"""Policies, patterns, and what runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from planning import Toy
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))

from live import LiveTensors

from partita.plan.activations import trace_activations
from partita.plan.plan import Activations
from partita_recompute.checkpoint import chosen, recompute

KINDS = [("none", "keep"), ("full", "full"), ("selective", "selective"), ("operators", "operators")]


@pytest.mark.parametrize(("policy", "default"), KINDS)
def test_policies(plan_of, policy, default):
    planned = plan_of(recompute__policy=policy)
    assert planned.plan.activations.default == default and not planned.problems


def kept(planned):
    return sum(c.bytes for c in planned.costs if c.category == "activations" and "kept" in c.what)


def test_budget_recomputes_as_few_blocks_as_fit(plan_of):
    everything, least = kept(plan_of()), kept(plan_of(recompute__policy="full"))
    block = (everything - least) / len(plan_of().model.blocks)
    for blocks in range(len(plan_of().model.blocks) + 1):
        planned = plan_of(recompute__policy="budget", recompute__budget=everything - blocks * block)
        assert not planned.problems
        names = [name for name, decision in planned.plan.activations.units if decision == "full"]
        assert names == list(planned.model.blocks[:blocks])
        assert kept(planned) <= everything - blocks * block
    assert plan_of(recompute__policy="budget", recompute__budget=everything).manifest.differences()


def test_budget_that_nothing_fits_or_that_is_not_given(plan_of):
    (found,) = plan_of(recompute__policy="budget", recompute__budget=1.0).problems
    assert found.key == "recompute.budget" and "every block recomputed" in found.reason
    (found,) = plan_of(recompute__policy="budget").problems
    assert found.key == "recompute.budget" and "needs a budget" in found.reason


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"recompute__policy": "ful"}, "recompute.policy", "is no policy"),
        ({"recompute__patterns": ["mlp"]}, "recompute.patterns", "by recompute.policy=selective only"),
        ({"recompute__budget": 1.0}, "recompute.budget", "by recompute.policy=budget only"),
        ({"recompute__operators": ["mm"]}, "recompute.operators", "by recompute.policy=operators only"),
        ({"recompute__policy": "operators", "recompute__operators": ["atention"]}, "recompute.operators", "is no operator"),
        ({"recompute__policy": "operators", "offload__activations": "host"}, "recompute.policy", "stay where they are"),
        ({"recompute__policy": "operators", "parallel__context": 2, "launch__ranks": 2}, "recompute.operators", "in place"),
        ({"recompute__policy": "selective", "recompute__patterns": ["atention"]}, "recompute.patterns", "matches 'atention'"),
    ],
)
def test_mistakes(plan_of, overrides, key, words):
    (found,) = [p for p in plan_of(**overrides).problems if p.key.startswith("recompute")]
    assert found.key == key and words in found.reason and found.remedy


def test_nearest_module_name(plan_of):
    (found,) = plan_of(recompute__policy="selective", recompute__patterns=["atention"]).problems
    assert "'attention'" in found.remedy


def test_model_without_blocks_is_told(plan_of):
    planned = plan_of(recompute__policy="full", model__layers=0)
    assert ("recompute.policy", "none") in [(line.key, line.got) for line in planned.manifest.differences()]


def test_transform_only_where_something_recomputes(registry, plan_of):
    assert "recompute" not in [t.name for t in registry.transforms(plan_of().plan)]
    assert "recompute" in [t.name for t in registry.transforms(plan_of(recompute__policy="full").plan)]


def test_chosen_modules():
    model = Toy(3, 32, 4, 50)
    assert chosen(model, Activations("full")) == ["blocks.0", "blocks.1", "blocks.2"]
    assert chosen(model, Activations("keep", units=(("blocks.1", "full"),))) == ["blocks.1"]
    mixed = Activations("selective", units=(("blocks.0", "full"), ("blocks.2", "keep")), patterns=("mlp",))
    assert chosen(model, mixed) == ["blocks.0", "blocks.1.mlp"]


SETTINGS = [
    Activations("full"),
    Activations("selective", patterns=("*attention*", "mlp")),
    Activations("operators", operators=("matmul", "attention")),
    Activations("operators", operators=("gelu", "*norm*")),
]


def saved_on_cpu(model: torch.nn.Module, ids: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """Bytes that autograd keeps, and gradients after a backward pass."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    alive = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        key = t.untyped_storage().data_ptr()
        if key not in own and key not in seen:
            seen[key] = t.untyped_storage().nbytes()
            alive.append(t.detach())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(ids).square().sum()
    loss.backward()
    return sum(seen.values()), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("setting", SETTINGS, ids=["full", "selective", "operators", "others"])
def test_gradients_are_the_same_bit_for_bit(setting):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Toy(2, 32, 4, 50)
    ids = torch.randint(50, (2, 16))
    _, plain = saved_on_cpu(model, ids)
    plain = [g.clone() for g in plain]
    model.zero_grad()
    _, again = saved_on_cpu(recompute(model, setting), ids)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_forward_without_gradients_is_plain():
    model = recompute(Toy(2, 32, 4, 50), Activations("full"))
    with torch.no_grad():
        assert not model(torch.zeros(1, 4, dtype=torch.int64)).requires_grad


def test_estimate_of_full_recompute_is_what_is_kept(plan_of):
    """Inputs of blocks, and what the root keeps; the traced numbers are checked against the CPU in tests/plan."""
    planned = plan_of(recompute__policy="full", launch__ranks=1, train__micro_batch=2)
    with torch.device("meta"):
        trace = trace_activations(Toy(4, 64, 4, 260), [f"blocks.{i}" for i in range(4)], "root", (2, 32), torch.float32)
    expected = trace.units["root"].kept + 4 * 2 * 32 * 64 * 4
    (kept,) = [c.bytes for c in planned.costs if c.what == "kept for backward"]
    assert kept == expected


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_kept_operators_run_once_and_others_twice():
    """Two blocks: products with weights and attention are not made again, the rest is."""
    counts = {}
    for setting in (Activations(), Activations("full"), Activations("operators", operators=("matmul", "attention"))):
        model, ids = recompute(Toy(2, 32, 4, 50), setting), torch.zeros(2, 8, dtype=torch.int64)
        loss = model(ids).square().sum()
        with Counted() as counted:
            loss.backward()
        counts[setting.default] = counted.calls
    plain, full, chosen = counts["keep"], counts["full"], counts["operators"]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (full["addmm"], full[attention]) == (6, 2)  # the last of a block is needed by nobody
    assert not {"addmm", attention} & (plain.keys() | chosen.keys())
    assert (plain.get("gelu", 0), full["gelu"], chosen["gelu"]) == (0, 2, 2)


def live_after_forward(setting: Activations) -> int:
    """Bytes alive between forward and backward, weights and logits apart."""
    model, ids = Toy(4, 64, 4, 260), torch.zeros(2, 32, dtype=torch.int64)
    model = recompute(model, setting)
    live = LiveTensors()
    for tensor in (ids, *model.parameters()):
        live.add(tensor)
        live.leave_out(tensor)
    with live:
        out = model(ids)
        return live.now() - out.nbytes


def test_estimate_of_operators_is_what_is_kept(plan_of):
    """All outputs of the chosen operators, the inputs of blocks, and what the root keeps."""
    for operators in (["matmul", "attention"], ["attention"], ["addmm", "gelu"]):
        planned = plan_of(
            recompute__policy="operators",
            recompute__operators=operators,
            launch__ranks=1,
            train__micro_batch=2,
            data__sequence=32,
        )
        live = live_after_forward(Activations("operators", operators=tuple(operators)))
        (estimate,) = [c.bytes for c in planned.costs if c.what == "kept for backward"]
        assert estimate == pytest.approx(live, rel=0.02), operators
    full, some, none = (kept(plan_of(recompute__policy=p)) for p in ("full", "operators", "none"))
    assert full < some < none
