"""Experts on several ranks: the layer in float64, and the same training for every degree and with every other strategy."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / room) for room in ("distributed", "models", "parallel", "train")),
]

import commands
import layouts
from against_dense import compare
from moe_ranks import beside_and_after, bytes_on_the_wire, column, compare_cut_layers, compare_layer, train
from pool import run_ranks
from small_models import make_config

from partita.errors import ConfigError
from partita.models.export import export_run
from partita.models.init import fill
from partita.models.llama import make_llama
from partita.train.loading import read_weights
from partita_moe.change import add_experts
from partita_moe.config import MoeConfig
from partita_moe.routing import EXPERT_CHOICE, SIGMOID, SOFTMAX_CHOSEN
from partita_moe.upcycle import Upcycled

SGD = ("moe.experts=4", "optimizer=sgd", "optimizer.lr=0.3", "train.grad_clip=0")
CUT = ("parallel.tensor=2", "moe.tensor=cut")
LONG = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="the whole product: PARTITA_LONG_TESTS=1 runs it")


# ------------------------------------------------------------------ the layer


@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_out_experts_are_the_layer_of_one_rank(ranks: int) -> None:
    """Outputs and all gradients in float64, with ranks that have few tokens, and none."""
    for top_k, gate, shared in ((1, SIGMOID, 1), (2, SOFTMAX_CHOSEN, 0), (4, SOFTMAX_CHOSEN, 1), (2, EXPERT_CHOICE, 0)):
        for differences in run_ranks(ranks, compare_layer, (top_k, gate, shared), [7, 0, 1, 12][:ranks]):
            assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 2), pytest.param(3, 3, marks=LONG)])
def test_cut_experts_are_the_layer_of_one_rank(ranks: int, tensor: int) -> None:
    """Outputs and all gradients in float64, with inner widths that don't divide, with ranks that have no tokens, alike ones and parts."""
    for differences in run_ranks(ranks, compare_cut_layers, [2 * tensor, 0][: ranks // tensor], tensor):
        assert len(differences) > 7 * 5 and max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize(("ranks", "top_k"), [(2, 1), (2, 3), (4, 2)])
def test_bytes_on_the_wire_are_those_of_the_formula(ranks: int, top_k: int) -> None:
    tokens, width = 40, 12
    want = 4 * tokens * top_k * width * 4 * (ranks - 1) // ranks
    assert run_ranks(ranks, bytes_on_the_wire, top_k, width, tokens) == [want] * ranks


def test_the_shared_expert_runs_while_rows_travel_in_any_format() -> None:
    """Whatever rows travel as, it runs between their departure and their arrival, in backward too, and no bit depends on it."""
    forward = ["start", "shared", "wait", "start", "wait"]
    backward = ["start", "wait", "start", "shared back", "wait"]
    for found in run_ranks(2, beside_and_after, ["native", "bfloat16", "int8", "fp8"]):
        assert found == dict.fromkeys(["native", "bfloat16", "int8", "fp8"], (forward + backward, True))


# ------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, metrics) of one rank, for each routing; with a checkpoint after six updates."""
    known: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def of(routing: str) -> tuple[Path, list[dict[str, Any]]]:
        if routing not in known:
            folder = tmp_path_factory.mktemp("moe") / "run"
            one = ("parallel.data=1", *SGD, *f"moe={routing}".split())
            known[routing] = folder, train(folder, *one, steps=6, save=True) + train(folder, *one, steps=4)
        return known[routing]

    return of


def assert_same(got: list[dict[str, Any]], want: list[dict[str, Any]], bound: float = 1e-5) -> None:
    for name in ("loss", "grad_norm"):
        assert column(got, name) == pytest.approx(column(want, name), rel=bound), name


@pytest.mark.parametrize(
    ("routing", "overrides"),
    [
        ("mixtral", ("parallel.data=2", "parallel.expert=2", "zero.stage=0")),
        ("mixtral moe.balance=global", ("parallel.data=4", "parallel.expert=2", "zero.stage=3", "train.micro_batch=1")),
        # clipped by a norm over experts of all ranks
        ("deepseek train.grad_clip=0.2", ("parallel.data=4", "parallel.expert=4", "zero.stage=2", "recompute=full")),
        ("mixtral", ("parallel.data=2", "parallel.expert=2", "zero.stage=1", "parallel.tensor=2")),
        ("deepseek", ("parallel.data=4", "parallel.expert=1", "zero.stage=3")),
        ("mixtral", ("parallel.data=2", "parallel.expert=2", "zero.stage=3", *CUT, "parallel.sequence_parallel=true")),
        ("deepseek", ("parallel.data=2", "parallel.expert=2", "zero.stage=3", "parallel.pipeline=2", "offload=host")),
    ],
    ids=str,
)
def test_every_degree_gives_the_same_training(reference: Any, tmp_path: Path, routing: str, overrides: tuple[str, ...]) -> None:
    """By SGD, where a gradient of the wrong size would show in the next loss."""
    got, want = train(tmp_path, *overrides, *SGD, *f"moe={routing}".split()), reference(routing)[1][:8]
    assert_same(got, want)
    assert got[-1]["moe_load"] == want[-1]["moe_load"]  # of all layers, those of other stages too
    for name in ("moe_entropy", "moe_aux_loss", "moe_max_violation", "moe_dropped"):
        assert column(got, name) == pytest.approx(column(want, name), rel=1e-4, abs=1e-9), name


def test_choosing_experts_train_alike_on_one_rank_and_two(tmp_path: Path) -> None:
    """Other micro-batches, other ranks: the same tokens are taken, as many by each expert."""
    model = ("model=bert", "moe=expert_choice", *SGD)
    want = train(tmp_path / "one", "parallel.data=1", *model, steps=4)
    got = train(tmp_path / "two", "parallel.data=2", "parallel.expert=2", "zero.stage=3", "train.micro_batch=1", *model, steps=4)
    assert_same(got, want)
    for line in [*want, *got]:
        assert line["moe_max_violation"] == 0.0 and line["moe_load"] == [[0.25] * 4] * 2
    assert column(got, "moe_untaken") == pytest.approx(column(want, "moe_untaken"))


JITTERED = ("model=llama", "model.layers=4", "model.dropout=0", "moe=mixtral", *SGD, "moe.jitter=0.3")


@pytest.fixture(scope="module")
def jittered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of one rank."""
    return train(tmp_path_factory.mktemp("jitter"), "parallel.data=1", *JITTERED, steps=3)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.data=2", "parallel.expert=2", "train.micro_batch=1", "recompute=full"),
        # several micro-batches under way, a part of their tokens here, and layers alone that run again
        (
            "parallel.data=1",
            "parallel.pipeline=2",
            "parallel.tensor=2",
            "parallel.sequence_parallel=true",
            "train.micro_batch=2",
            "recompute=selective",
            "recompute.patterns=[mlp]",
        ),
        pytest.param(("parallel.data=1", "parallel.context=2", "train.micro_batch=4"), marks=LONG),
        pytest.param(
            ("parallel.data=1", "parallel.pipeline=2", "parallel.schedule=zbv", "train.micro_batch=1", "recompute=full"),
            marks=LONG,
        ),
    ],
    ids=str,
)
def test_jitter_is_drawn_alike_in_every_layout(jittered: Any, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert_same(train(tmp_path, *overrides, *JITTERED, steps=3), jittered)


def test_jitter_is_of_training_alone(jittered: Any, tmp_path: Path) -> None:
    """With the same weights losses differ in training, and are the same in evaluation."""
    still, moved = (
        layouts.train(tmp_path / j, "parallel.data=1", *JITTERED, f"moe.jitter={j}", "optimizer.lr=0", steps=1, evaluate=True)
        for j in ("0", "0.9")
    )
    assert still["eval"] == moved["eval"]
    assert abs(still["losses"][0] - moved["losses"][0]) > 1e-5
    assert jittered[0]["loss"] not in (still["losses"][0], moved["losses"][0])


PRODUCT = [
    (f"zero.stage={zero}", *(axis for axis in axes if axis))
    for zero, axes in itertools.product(
        range(4),
        itertools.product(
            ("", "parallel.tensor=2"), ("", "parallel.pipeline=2"), ("", "offload=host"), ("recompute=none", "recompute=full")
        ),
    )
]


@LONG
@pytest.mark.parametrize("overrides", PRODUCT, ids=str)
@pytest.mark.parametrize("ranks", [4, 8])
def test_the_whole_product(reference: Any, tmp_path: Path, ranks: int, overrides: tuple[str, ...]) -> None:
    """Expert parallelism with every stage, tensor, pipeline, offload and recompute."""
    data = ranks // 2 ** sum(o in ("parallel.tensor=2", "parallel.pipeline=2") for o in overrides)
    if data == 1:
        pytest.skip("no rank is left that could share experts")
    expert = min(data, 4)
    parallel = (f"parallel.data={data}", f"parallel.expert={expert}")
    assert_same(train(tmp_path, *parallel, *overrides, "moe=deepseek", *SGD, steps=4), reference("deepseek")[1][:4])


CUTS = [
    (f"zero.stage={zero}", *(axis for axis in axes if axis))
    for zero, axes in itertools.product(
        range(4), itertools.product(("", "parallel.sequence_parallel=true"), ("", "parallel.pipeline=2"), ("", "recompute=full"))
    )
]


@LONG
@pytest.mark.parametrize("overrides", CUTS, ids=str)
@pytest.mark.parametrize("expert", [1, 2])
def test_the_whole_product_of_cut_experts(reference: Any, tmp_path: Path, expert: int, overrides: tuple[str, ...]) -> None:
    """Experts that the tensor axis cuts, whole on each data rank or shared out, with every stage, sequence parallelism, pipeline and recompute."""
    parallel = ("parallel.data=2", f"parallel.expert={expert}", *CUT)
    assert_same(train(tmp_path, *parallel, *overrides, "moe=deepseek", *SGD, steps=4), reference("deepseek")[1][:4])


def test_the_number_of_expert_ranks_may_change(reference: Any, tmp_path: Path) -> None:
    """Experts and the balancing bias come out of a checkpoint of one rank and go on on four; weights alone, too."""
    folder, want = reference("deepseek")
    four = ("parallel.data=4", "parallel.expert=4", "zero.stage=3", "moe=deepseek", *SGD)
    resume = f"train.resume={folder}/checkpoints/step-00000006"
    assert_same(train(tmp_path / "all", *four, resume, steps=4), want[6:])
    assert_same(train(tmp_path / "weights", *four, resume, "train.resume_optimizer=false", steps=1), want[6:7])


@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=LONG)])
def test_cut_experts_are_those_of_the_dense_model(tmp_path: Path, model: str) -> None:
    """Logits as for generation, the norm, and the gradient of each parameter put together of the parts that lie on four ranks."""
    sizes = (f"model={model}", "model.vocab=301", "model.dropout=0", "moe=deepseek", "moe.ffn=13", "moe.balance=none", *SGD)
    both = ("parallel.data=2", "parallel.expert=2", "zero.stage=3", *CUT, "parallel.sequence_parallel=true")
    assert run_ranks(4, compare, layouts.spec_of(tmp_path, *both, *sizes)) == [[]] * 4


def test_cut_experts_go_on_in_other_layouts(reference: Any, tmp_path: Path) -> None:
    """Out of a checkpoint of one rank, on four that cut experts twice, and out of theirs on one again."""
    folder, want = reference("deepseek")
    cut, model = ("parallel.data=2", "parallel.expert=2", "zero.stage=2", *CUT), ("moe=deepseek", *SGD)
    resume = "train.resume={}/checkpoints/step-0000000{}"
    assert_same(train(tmp_path / "cut", *cut, *model, resume.format(folder, 6), steps=1, save=True), want[6:7])
    train(tmp_path / "one", "parallel.data=1", *model, resume.format(folder, 6), steps=1, save=True)
    one = read_weights(tmp_path / "one")
    for name, weight in read_weights(tmp_path / "cut").items():
        torch.testing.assert_close(weight, one[name], rtol=1e-5, atol=1e-6)
    assert_same(train(tmp_path / "back", "parallel.data=1", *model, resume.format(tmp_path / "cut", 7), steps=3), want[7:])


def test_experts_begin_as_the_dense_layer(tmp_path: Path) -> None:
    """Logits of an upcycled model are those of the dense one that a checkpoint holds."""
    train(tmp_path, "parallel.data=1", "model=llama", "model.dropout=0", steps=2, save=True)
    node = make_config("llama", layers=2, width=32, heads=4)
    vocab = len(read_weights(tmp_path)["tokens.weight"])
    with torch.device("meta"):
        dense, sparse = make_llama(node, vocab), make_llama(node, vocab)
        moe = MoeConfig("mixtral", experts=4, upcycle=str(tmp_path))
        sparse = add_experts(sparse, SimpleNamespace(moe=moe, seed=1))
    stored = read_weights(tmp_path)
    fill(dense, lambda name, tensor: tensor.copy_(stored[name]))
    fill(sparse, lambda name, tensor: tensor.copy_(sparse.partita_weights(name, tuple(tensor.shape))))
    ids = torch.randint(vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(sparse.eval()(ids), dense.eval()(ids), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"moe\.upcycle: 'blocks\.0\.mlp\.gate_up\.weight' should have shape"):
        Upcycled(dense, str(tmp_path), 1)("blocks.0.mlp.experts.gate_up", (4, 32, 6))


def test_a_run_draws_its_loads_and_is_exported(tmp_path: Path) -> None:
    """Through the command line: two ranks that share experts, a picture in the run's folder, a Mixtral that transformers loads."""
    commands.train(
        tmp_path / "run",
        "model=llama",
        "moe=mixtral",
        "moe.experts=4",
        "parallel.data=2",
        "parallel.expert=2",
        "train.steps=3",
        "train.sample=4",
    )
    assert "<svg" in (tmp_path / "run/moe_load.svg").read_text()
    assert (tmp_path / "run/sample.txt").read_text()  # by both ranks: each holds experts that the text needs
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run", tmp_path / "out"))
    assert type(theirs).__name__ == "MixtralForCausalLM"
    trained = read_weights(tmp_path / "run")["blocks.1.mlp.experts.gate_up"]
    assert torch.equal(theirs.model.layers[1].mlp.experts.gate_up_proj, trained.transpose(1, 2))


def test_experts_of_a_transformers_model_train_as_there(tmp_path: Path) -> None:
    """The reference is transformers' own layer on one rank; ours shares its experts out."""
    options = {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    model = ("model=hf", "model.dropout=0", *(f"+model.options.{k}={v}" for k, v in options.items()), *SGD[1:])
    want = train(tmp_path / "theirs", "parallel.data=1", *model, steps=4)
    ours = ("moe=hf", "moe.balance=none", "parallel.expert=2", "zero.stage=3", *model)
    for layout in (("parallel.data=4",), ("parallel.data=2", "parallel.tensor=2"), ("parallel.data=2", *CUT)):
        assert_same(train(tmp_path / str(len(layout)), *layout, *ours, steps=4), want)
