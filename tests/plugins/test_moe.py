"""Mixture of experts: routing against formulas, the layer against a plain loop, plans and refusals."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from small_models import VOCAB, make_config, spread

from partita.errors import ConfigError
from partita.models.bert import make_bert
from partita.models.common import Mlp
from partita.models.export import export_hf
from partita.models.gpt import make_gpt
from partita.models.init import initialize
from partita.models.llama import SwiGlu, make_llama
from partita.models.noise import Noise, uniform
from partita.plan.plan import Layout, Plan
from partita_kernels import expert_order
from partita_moe.change import _layer, add_experts
from partita_moe.checks import looks_ahead, wrong
from partita_moe.config import MoeConfig
from partita_moe.expert_choice import taken
from partita_moe.jitter import PLACES, bring_noise
from partita_moe.layer import MoeLayer
from partita_moe.picture import heat_map
from partita_moe.routing import (
    EXPERT_CHOICE,
    SIGMOID,
    SOFTMAX_ALL,
    SOFTMAX_CHOSEN,
    Routing,
    balance_loss,
    choose,
    evened,
    within_capacity,
    worst_violation,
    z_loss,
)
from partita_moe.strategy import partita_export
from partita_recompute.checkpoint import checkpointed

F64 = torch.float64
MODELS = {"gpt": make_gpt, "llama": make_llama, "bert": make_bert}


def make_layer(routing: Routing, swiglu: bool = False, width: int = 12, inner: int = 20) -> MoeLayer:
    dense = SwiGlu(width, inner) if swiglu else Mlp(width, inner, "tanh")
    layer = _layer(dense, routing, None)
    generator = torch.Generator().manual_seed(5)
    for p in layer.parameters():
        nn.init.normal_(p, 0.0, 0.3, generator=generator)
    return layer.double()


def plain(layer: MoeLayer, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    out = []
    for token, ids, weights in zip(x, chosen.tolist(), gates):
        y = torch.zeros_like(token)
        for e, w in zip(ids, weights):
            n = layer.routing.experts
            y = y + w * layer.experts(token[None], torch.tensor([int(i == e) for i in range(n)]))[0]
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(("gate", "k"), [(SOFTMAX_ALL, 1), (SOFTMAX_CHOSEN, 2), (SIGMOID, 3)])
def test_layer_is_the_mixture(gate: str, k: int, swiglu: bool) -> None:
    layer = make_layer(Routing(5, k, gate, balance="none"), swiglu)
    x = torch.randn(2, 7, 12, dtype=F64, requires_grad=True)
    y = layer(x)
    flat = x.reshape(-1, 12)
    choice = choose(flat @ layer.router.t(), layer.routing)
    want = plain(layer, flat, choice.experts, choice.gates).view_as(x)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(y)
    names = [n for n, _ in layer.named_parameters()]
    got = torch.autograd.grad((y * seed).sum(), [x, *layer.parameters()], retain_graph=True)
    true = torch.autograd.grad((want * seed).sum(), [x, *layer.parameters()])
    for name, a, b in zip(["x", *names], got, true):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_all_experts_of_all_tokens_is_the_dense_mixture() -> None:
    layer = make_layer(Routing(4, 4, SOFTMAX_CHOSEN, balance="none"))
    x = torch.randn(1, 9, 12, dtype=F64)
    p = (x[0] @ layer.router.t()).softmax(-1)
    each = torch.stack([layer.experts(x[0], torch.tensor([9 * int(i == e) for i in range(4)])) for e in range(4)], 1)
    torch.testing.assert_close(layer(x)[0], (p.unsqueeze(2) * each).sum(1), rtol=1e-12, atol=1e-12)


def test_equal_experts_are_one_layer() -> None:
    layer = make_layer(Routing(4, 2, SOFTMAX_CHOSEN, balance="none"))
    with torch.no_grad():
        for p in layer.experts.parameters():
            p.copy_(p[:1].expand_as(p))
    x = torch.randn(1, 6, 12, dtype=F64)
    torch.testing.assert_close(layer(x)[0], layer.experts(x[0], torch.tensor([6, 0, 0, 0])), rtol=1e-12, atol=1e-12)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    layer = make_layer(Routing(4, 1, SOFTMAX_ALL, balance="none"))
    with torch.no_grad():
        layer.router.zero_()
        layer.router[2] = 1.0
    layer(torch.rand(1, 5, 12, dtype=F64)).sum().backward()
    assert layer.experts.up.grad is not None
    assert layer.experts.up.grad[2].abs().sum() > 0
    assert all(torch.equal(layer.experts.up.grad[i], torch.zeros_like(layer.experts.up.grad[i])) for i in (0, 1, 3))


# ------------------------------------------------------------------ routing


def test_the_bias_chooses_and_does_not_weigh() -> None:
    routing = Routing(4, 1, SIGMOID)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    plain_choice = choose(logits, routing)
    moved = choose(logits, routing, torch.tensor([0.0, 0.0, 0.0, 9.0]))
    assert plain_choice.experts.tolist() == [[0]] and moved.experts.tolist() == [[3]]
    two = choose(logits, Routing(4, 2, SIGMOID), torch.tensor([0.0, 0.0, 9.0, 9.0]))
    s = logits.sigmoid()[0]
    want = {2: s[2] / (s[2] + s[3]), 3: s[3] / (s[2] + s[3])}
    for e, g in zip(two.experts[0].tolist(), two.gates[0]):
        torch.testing.assert_close(g, want[e])


def test_groups_limit_the_choice() -> None:
    logits = torch.tensor([[5.0, -5.0, 2.0, 2.0, 1.0, 1.0]])  # best single expert in group 0, best two in group 1
    assert set(choose(logits, Routing(6, 2, SIGMOID, groups=3, group_top_k=1)).experts[0].tolist()) == {2, 3}


@pytest.mark.parametrize("balance", ["sequence", "batch"])
def test_auxiliary_loss_is_one_when_even_and_the_count_when_collapsed(balance: str) -> None:
    routing = Routing(8, 1, SOFTMAX_ALL, balance=balance)
    even = choose(torch.eye(8).repeat(2, 1) * 1e-3, routing)
    assert float(balance_loss(even, routing, 2)) == pytest.approx(1.0, abs=1e-3)
    collapsed = choose(torch.tensor([[50.0] + [0.0] * 7]).expand(16, 8), routing)
    assert float(balance_loss(collapsed, routing, 2)) == pytest.approx(8.0, abs=1e-3)


def test_global_balance_weighs_probabilities_by_the_shares_of_the_update_before() -> None:
    routing = Routing(4, 2, SOFTMAX_CHOSEN, balance="global")
    logits = torch.randn(6, 4, dtype=F64, requires_grad=True)
    share = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=F64)
    loss = balance_loss(choose(logits, routing), routing, 3, share)
    assert float(loss.detach()) == pytest.approx(float(4 * (share * logits.softmax(-1).mean(0)).sum().detach()))
    layer = make_layer(routing)
    assert layer.load is not None and layer.load.tolist() == [0.25] * 4


def test_the_picture_of_loads() -> None:
    lines = [{"step": i, "moe_load": [[0.25, 0.75, 0.0, 0.0], [0.25] * 4]} for i in range(1, 501)]
    assert heat_map([{"step": 1, "loss": 2.0}]) is None
    picture = heat_map([*lines, {"step": 500, "eval_loss": 1.0}])
    assert picture is not None
    cells = [e for e in ElementTree.fromstring(picture) if e.tag.endswith("rect")]
    assert len(cells) == 160 * 4 * 2
    assert [c.get("fill") for c in cells[::160]] == ["#ffffff", "#ff0000", "#0000ff", "#0000ff", *["#ffffff"] * 4]
    assert ">update 1<" in picture and ">500<" in picture


def test_z_loss_of_zero_logits() -> None:
    assert float(z_loss(torch.zeros(3, 8))) == pytest.approx(math.log(8) ** 2)


def test_bias_evens_a_skewed_router() -> None:
    torch.manual_seed(0)
    routing, bias = Routing(8, 2, SIGMOID, balance="bias"), torch.zeros(8)
    skew = torch.linspace(0, 2, 8)
    violations = []
    for _ in range(400):
        choice = choose(torch.randn(512, 8) * 0.7 + skew, routing, bias)
        counts = torch.bincount(choice.experts.reshape(-1), minlength=8).double()
        violations.append(worst_violation(counts[None]))
        bias = evened(bias, counts.float(), 5e-3)
    assert violations[-1] < 0.3 < violations[0]


def test_capacity_keeps_first_choices_first() -> None:
    routing = Routing(2, 2, SOFTMAX_CHOSEN, capacity=0.75)
    choice = choose(torch.tensor([[1.0, 0.0]] * 4), routing)  # all want 0 first, then 1: room for ceil(0.75 * 8 / 2) = 3
    assert within_capacity(choice, routing).tolist() == [[True, True]] * 3 + [[False, False]]


@pytest.mark.parametrize("drop", ["position", "probability"])
@pytest.mark.parametrize("capacity", [0.3, 0.7, 1.0])
def test_places_are_given_as_in_a_loop(drop: str, capacity: float) -> None:
    """Odd numbers of tokens, and equal gates among them."""
    routing = Routing(5, 3, SOFTMAX_ALL, capacity=capacity, drop=drop)
    logits = torch.randn(23, 5, generator=torch.Generator().manual_seed(2))
    choice = choose(torch.cat([logits, logits[:4]]), routing)
    queue = [(j, t) for j in range(3) for t in range(27)]
    if drop == "probability":
        queue.sort(key=lambda place: -float(choice.gates[place[1], place[0]]))
    room = dict.fromkeys(range(5), math.ceil(capacity * 3 * 27 / 5))
    want = [[False] * 3 for _ in range(27)]
    for j, t in queue:
        expert = int(choice.experts[t, j])
        want[t][j] = room[expert] > 0
        room[expert] -= 1
    assert within_capacity(choice, routing).tolist() == want
    assert any(False in row for row in want)


def test_capacity_without_a_limit_is_dropless() -> None:
    x = torch.randn(2, 9, 12, dtype=F64)
    free, tight = make_layer(Routing(4, 2, SOFTMAX_CHOSEN)), make_layer(Routing(4, 2, SOFTMAX_CHOSEN, capacity=4.0))
    assert torch.equal(free(x), tight(x))


def test_outside_of_training_nobody_is_dropped() -> None:
    x = torch.randn(2, 9, 12, dtype=F64)
    free, tight = make_layer(Routing(4, 2, SOFTMAX_CHOSEN)), make_layer(Routing(4, 2, SOFTMAX_CHOSEN, capacity=0.3))
    assert not torch.allclose(free(x), tight(x))
    assert torch.equal(free.eval()(x), tight.eval()(x))


def test_the_estimate_is_the_formula(plan_of) -> None:
    """4 T k C bytes (e - 1) / e for each layer."""
    planned = plan_of(launch__ranks=4, model__name="llama", moe__name="mixtral", parallel__expert=4)
    (cost,) = [c for c in planned.costs if c.what == "tokens to experts and back"]
    config, schedule = planned.config, planned.plan.schedule
    tokens = schedule.micro_batch * schedule.micro_batches * config.data.sequence
    assert cost.bytes == config.model.layers * 4 * tokens * 2 * config.model.width * 4 * 3 // 4


# ------------------------------------------------------------------ experts that choose


@pytest.mark.parametrize(("k", "sequences", "tokens"), [(1, 1, 3), (2, 3, 7), (4, 2, 5)])
def test_choosing_experts_are_those_of_a_loop(k: int, sequences: int, tokens: int) -> None:
    """Each takes ceil(k T / E) tokens of each sequence; outputs and all gradients, in training and outside."""
    layer = make_layer(Routing(4, k, EXPERT_CHOICE, balance="none", shared=1))
    assert layer.dense is not None
    x = torch.randn(sequences, tokens, 12, dtype=F64, generator=torch.Generator().manual_seed(k), requires_grad=True)
    rows = []
    for sequence in x:
        scores = (sequence @ layer.router.t()).softmax(-1)
        out = list(layer.dense(sequence))
        for e in range(4):
            ranked = sorted(range(tokens), key=lambda t, e=e, s=scores: -float(s[t, e].detach()))
            for t in ranked[: math.ceil(k * tokens / 4)]:
                only = torch.tensor([int(i == e) for i in range(4)])
                out[t] = out[t] + scores[t, e] * layer.experts(sequence[t : t + 1], only)[0]
        rows.append(torch.stack(out))
    y, want = layer(x), torch.stack(rows)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(layer.eval()(x), y)
    seed = torch.randn_like(y)
    got = torch.autograd.grad((y * seed).sum(), [x, *layer.parameters()])
    for a, b in zip(got, torch.autograd.grad((want * seed).sum(), [x, *layer.parameters()])):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_token_that_nobody_takes_gets_what_all_get() -> None:
    layer = make_layer(Routing(4, 1, EXPERT_CHOICE, balance="none", shared=1))
    assert layer.dense is not None and layer.figures is None
    with torch.no_grad():
        layer.router.zero_()  # all scores are equal: each expert takes the first two of eight tokens
    x = torch.randn(2, 8, 12, dtype=F64)
    y = layer(x)
    torch.testing.assert_close(y[:, 2:], layer.dense(x)[:, 2:], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(y[:, :2], layer.dense(x)[:, :2])
    assert layer.figures is not None
    assert layer.figures[:4].tolist() == [4.0] * 4 and layer.figures[4:6].tolist() == [0.0, 12.0]


def test_the_order_of_choosing_experts_is_that_of_the_kernel() -> None:
    choice, order = taken(torch.randn(3 * 11, 6), Routing(6, 2, EXPERT_CHOICE), 3)
    want = expert_order(choice.experts, 6)
    assert torch.equal(order.places, want.places) and torch.equal(order.sizes, want.sizes)
    assert torch.equal(order.slots, want.slots[: len(order.slots)]) and order.sizes.tolist() == [3 * 4] * 6


def test_choosing_experts_are_refused_where_later_tokens_are_not_to_be_seen(plan_of) -> None:
    (found,) = plan_of(launch__ranks=1, model__name="llama", moe__name="expert_choice").problems
    assert found.key == "moe.name" and "later tokens" in found.reason and "moe.look_ahead=true" in found.remedy
    assert not plan_of(launch__ranks=1, model__name="llama", moe__name="expert_choice", moe__look_ahead=True).problems


@pytest.mark.parametrize(
    ("keys", "layout", "key"),
    [
        ({}, {}, None),
        ({"look_ahead": True}, {}, "moe.look_ahead"),
        ({"capacity": 1.25}, {}, "moe.capacity"),
        ({"balance": "bias"}, {}, "moe.balance"),
        ({"balance": "none", "aux_weight": 0.5}, {}, "moe.aux_weight"),
        ({"groups": 2, "group_top_k": 2}, {}, "moe.groups"),
        ({"drop": "probability"}, {}, "moe.drop"),
        ({}, {"context": 2}, "parallel.context"),
        ({}, {"tensor": 2, "sequence_parallel": True}, "parallel.sequence_parallel"),
    ],
)
def test_experts_that_choose_in_a_masked_model(keys: dict[str, Any], layout: dict[str, Any], key: str | None) -> None:
    config = MoeConfig("expert_choice", **keys)
    draft: Any = SimpleNamespace(
        config=SimpleNamespace(moe=config), model=SimpleNamespace(module=SimpleNamespace(partita_loss="masked"))
    )
    found = [p.key for p in (*wrong(config), *looks_ahead(Plan(layout=Layout(**layout)), draft))]
    assert found[:1] == ([key] if key else [])


# ------------------------------------------------------------------ jitter


def test_jitter_is_of_the_routers_input_alone() -> None:
    layer = make_layer(Routing(5, 2, SOFTMAX_CHOSEN, balance="none", jitter=0.4))
    x, noise = torch.randn(3, 7, 12, dtype=F64), Noise(1, 2, torch.arange(3))
    factor = 1 + 0.4 * uniform(x, noise, PLACES)
    assert 0.6 <= float(factor.min()) < 0.65 and 1.35 < float(factor.max()) <= 1.4
    choice = choose((x * factor).reshape(-1, 12) @ layer.router.t(), layer.routing)
    want = plain(layer, x.reshape(-1, 12), choice.experts, choice.gates).view_as(x)
    torch.testing.assert_close(layer(x, noise), want, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x, noise), layer(x))
    still = make_layer(Routing(5, 2, SOFTMAX_CHOSEN, balance="none", jitter=0.0))
    assert torch.equal(still(x, noise), layer(x)) and torch.equal(still(x), layer(x))


@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_jitter_is_drawn_again_alike(name: str) -> None:
    """Three blocks of two micro-batches, in flight together: their gradients are the same where blocks, or expert layers alone, are run again."""
    moe = MoeConfig("mixtral", experts=4, jitter=0.5, aux_weight=0.0)
    ids = torch.randint(VOCAB, (2, 3, 16), generator=torch.Generator().manual_seed(1))
    gradients = []
    for again in ("nothing", "blocks", "layers"):
        with torch.device("meta"):
            model: Any = add_experts(MODELS[name](make_config(name, layers=3), VOCAB), SimpleNamespace(moe=moe))
        model = initialize(model, 3)
        assert model.partita_noise
        for block in model.blocks if again != "nothing" else ():
            part = block if again == "blocks" else block.mlp
            part.forward = checkpointed(part.forward)
        sums = [model(ids[i], noise=Noise(1, 2, torch.arange(3) + 3 * i)).square().sum() for i in range(2)]
        assert all(block.mlp.noise is None for block in model.blocks)
        sums[0].backward()
        sums[1].backward()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
    with torch.no_grad():
        one, two = (model(ids[0], noise=Noise(1, step, torch.arange(3))) for step in (2, 3))
        assert not torch.allclose(one, two)


def test_blocks_without_noise_have_no_jitter() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(ConfigError, match=r"moe\.jitter: Block\.forward takes no argument `noise`"):
        bring_noise(Block(), make_layer(Routing(4, 1, SOFTMAX_ALL)))
    assert [p.key for p in wrong(MoeConfig("hf", jitter=0.1))] == ["moe.jitter"]


# ------------------------------------------------------------------ plans


def test_dense_by_default(plan_of) -> None:
    assert not plan_of(launch__ranks=1).problems


def test_experts_share_the_data_ranks(plan_of) -> None:
    planned = plan_of(launch__ranks=4, model__name="llama", moe__name="mixtral", parallel__expert="auto")
    assert not planned.problems
    assert (planned.plan.layout.expert, planned.plan.layout.shard, planned.plan.layout.world) == (4, 4, 4)
    two = plan_of(launch__ranks=4, model__name="llama", moe__name="mixtral", parallel__expert=2)
    assert (two.plan.layout.expert, two.plan.layout.shard, two.plan.layout.replicate) == (2, 2, 2)


def test_a_tensor_axis_cuts_experts_where_it_is_asked_to(plan_of) -> None:
    """Less memory of weights and of what lies between their matrices; nothing changes where there is no such axis."""
    model = {"launch__ranks": 4, "model__name": "llama", "moe__name": "deepseek", "parallel__expert": 2, "moe__ffn": 100}
    whole, cut = (plan_of(**model, parallel__tensor=2, moe__tensor=how) for how in ("whole", "cut"))
    assert not whole.problems and not cut.problems
    layers, width = whole.config.model.layers, whole.config.model.width
    experts = layers * (8 // 2 + 1) * 3 * width * 100  # four routed ones and the one that all tokens see
    for category in ("parameters", "gradients"):
        bytes_ = [sum(c.bytes for c in p.costs if c.category == category) for p in (whole, cut)]
        assert bytes_[0] - bytes_[1] == pytest.approx(experts // 2 * 4, rel=0.01)
    kept = [sum(c.bytes for c in p.costs if c.what == "kept for backward") for p in (whole, cut)]
    rows = whole.plan.schedule.micro_batch * whole.config.data.sequence * 2
    assert kept[0] - kept[1] == layers * rows * 3 * 100 // 2 * 4  # gate, up and their product
    alone = plan_of(**model, moe__tensor="cut")
    assert not alone.problems
    assert [line.got for line in alone.draft.lines if line.key == "moe.tensor"] == ["whole"]


def test_the_planner_finds_layouts_for_cut_experts(plan_of) -> None:
    found = plan_of(
        cluster__device="h100",
        cluster__nodes=1,
        cluster__devices_per_node=8,
        model__name="llama",
        model__width=4096,
        model__layers=4,
        model__heads=32,
        moe__name="mixtral",
        moe__tensor="cut",
        parallel__tensor="auto",
        parallel__expert="auto",
        parallel__others="auto",
        parallel__sequence_parallel="auto",
    )
    assert not found.problems and found.choice is not None
    assert found.plan.layout.world == 8


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ({"moe__name": "mixtrall"}, "moe.name", "is no routing"),
        ({"parallel__expert": 2}, "parallel.expert", "without experts"),
        ({"model__name": "llama", "moe__name": "mixtral", "moe__experts": 3, "parallel__expert": 2}, "parallel.expert", "evenly"),
        ({"moe__name": "mixtral", "moe__top_k": 9}, "moe.top_k", "9 of 8"),
        ({"moe__name": "mixtral", "moe__groups": 3}, "moe.groups", "3 groups"),
        ({"moe__name": "deepseek", "moe__groups": 4, "moe__group_top_k": 1, "moe__top_k": 4}, "moe.group_top_k", "too few"),
        ({"moe__name": "mixtral", "moe__balance": "even"}, "moe.balance", "balances nothing"),
        ({"moe__name": "mixtral", "moe__scale": 2.5}, "moe.scale", "does not scale"),
        ({"moe__name": "residual", "moe__shared": 1}, "moe.shared", "dense half"),
        ({"moe__name": "switch", "moe__capacity": 0.0}, "moe.capacity", "no room"),
        ({"moe__name": "mixtral", "moe__drop": "probability"}, "moe.drop", "nobody is dropped"),
        ({"moe__name": "switch", "moe__capacity": 1.0, "moe__drop": "random"}, "moe.drop", "drops nobody"),
        ({"moe__name": "mixtral", "moe__look_ahead": True}, "moe.look_ahead", "look ahead"),
        ({"moe__name": "mixtral", "moe__jitter": 1.0}, "moe.jitter", "no width"),
        ({"moe__jitter": 0.1}, "moe.jitter", "of no use"),
        ({"moe__experts": 4}, "moe.experts", "of no use"),
        ({"moe__tensor": "cut"}, "moe.tensor", "of no use"),
        ({"moe__name": "mixtral", "moe__tensor": "half"}, "moe.tensor", "whether experts are cut"),
        (
            {"model__name": "llama", "moe__name": "mixtral", "moe__tensor": "cut", "moe__ffn": 1, "parallel__tensor": 2},
            "parallel.tensor",
            "1 to share among 2",
        ),
        (
            {"model__name": "llama", "moe__name": "mixtral", "parallel__tensor": 2, "parallel__styles": ["*.experts=colwise"]},
            "parallel.styles",
            "is a stack of layers",
        ),
    ],
)
def test_refused(plan_of, overrides, key, words) -> None:
    (found,) = plan_of(launch__ranks=2, **overrides).problems
    assert found.key == key and words in found.reason


@pytest.mark.parametrize("tie", [True, False])
def test_a_llama_with_mixtrals_routing_is_exported_as_one(tie: bool, tmp_path: Path) -> None:
    node = make_config("llama", kv_heads=2, tie_embeddings=tie, context=16)
    with torch.device("meta"):
        model = add_experts(make_llama(node, VOCAB), SimpleNamespace(moe=MoeConfig("mixtral", experts=4, top_k=3, ffn=24)))
    ours = spread(initialize(model, 3)).eval()
    state = {n: t.detach() for n, t in [*ours.named_parameters(), *ours.named_buffers()]}
    plain_config = {"moe": vars(MoeConfig("mixtral", experts=4, top_k=3, ffn=24)), "model": {"name": "llama"}}
    export_hf(node.model, state, tmp_path / "out", partita_export(plain_config, state))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == "MixtralForCausalLM" and not any(info[k] for k in ("missing_keys", "unexpected_keys")), info
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, ours(ids), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "keys", "key"),
    [
        ("gpt", {"name": "mixtral"}, "model.name"),
        ("llama", {"name": "switch"}, "moe.name"),
        ("llama", {"name": "mixtral", "shared": 1}, "moe.shared"),
        ("llama", {"name": "mixtral", "every": 2}, "moe.every"),
        ("llama", {"name": "mixtral", "groups": 2}, "moe.groups"),
        ("llama", {"name": "mixtral", "balance": "bias"}, "moe.balance"),
        ("llama", {"name": "gshard", "capacity": 1.5}, "moe.capacity"),
    ],
)
def test_what_is_no_mixtral_is_not_exported(model: str, keys: dict[str, Any], key: str) -> None:
    """A folder without the experts, or with another routing, would look like a model and compute something else."""
    with pytest.raises(ConfigError, match=re.escape(key)):
        partita_export({"moe": vars(MoeConfig(**keys)), "model": {"name": model}}, {})


def test_dense_models_have_their_own_export() -> None:
    assert partita_export({"moe": {"name": "none"}}, {}) is None
    assert partita_export({}, {}) is None


# ------------------------------------------------------------------ accumulation


def test_auxiliary_loss_does_not_grow_with_accumulation() -> None:
    """The same micro-batch once, or four times with a quarter of the weight: the same gradient of the router."""
    gradients = []
    for times in (1, 4):
        layer = make_layer(Routing(4, 2, SOFTMAX_CHOSEN, aux_weight=0.5, z_weight=0.1))
        layer.term_weight = lambda n=times: 1.0 / (9 * n)
        x = torch.randn(1, 9, 12, dtype=F64, generator=torch.Generator().manual_seed(1))
        for _ in range(times):
            (layer(x) * 0.0).sum().backward()
        assert layer.router.grad is not None
        gradients.append(layer.router.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
