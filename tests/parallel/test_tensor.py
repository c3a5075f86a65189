"""Tensor and sequence parallel against one rank: the same 20 losses and gradient norms, with dropout, whatever else is cut."""

from __future__ import annotations

import pytest
from layouts import assert_same, planned, reference, train

GPT = ()
LLAMA = ("model=llama", "model.kv_heads=2")
BERT = ("model=bert",)
SEQUENCE = ("parallel.sequence_parallel=true",)
# plain SGD shows a scale that Adam would hide; without clipping, so does the norm
SGD = ("optimizer=sgd", "optimizer.lr=0.05", "train.grad_clip=0")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, ("parallel.data=1", "parallel.tensor=2")),
        (GPT, ("parallel.data=1", "parallel.tensor=4", *SEQUENCE)),
        (LLAMA, ("parallel.data=1", "parallel.tensor=2", *SEQUENCE)),
        (BERT, ("parallel.data=1", "parallel.tensor=2")),
        (BERT, ("parallel.data=1", "parallel.tensor=4", *SEQUENCE)),
    ],
    ids=lambda v: "-".join(x.split("=")[-1] for x in v) or "gpt",
)
def test_losses_and_norms_are_those_of_one_rank(tmp_path, model, layout):
    assert_same(train(tmp_path, *model, *layout, evaluate=True), reference(*model))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_each_zero_stage(tmp_path, stage):
    layout = ("parallel.data=2", "parallel.tensor=2", f"+strategy=zero{stage}", "train.micro_batch=2")
    more = SEQUENCE if stage % 2 else ()
    assert_same(train(tmp_path, *SGD, *layout, *more, evaluate=True), reference(*SGD))


def test_with_hybrid_shards(tmp_path):
    layout = ("+strategy=hsdp", "parallel.replicate=2", "parallel.shard=2", "parallel.tensor=2", "train.micro_batch=1")
    assert_same(train(tmp_path, *SGD, *layout, *SEQUENCE), reference(*SGD))


@pytest.mark.parametrize(
    "model",
    [
        ("model.vocab=301", "model.ffn=97"),
        ("model=llama", "model.kv_heads=1", "model.ffn=71", "model.vocab=259", "parallel.replicate_kv=true"),
        ("model.tie_embeddings=false", "model.vocab=263", "train.label_smoothing=0.1", "train.z_loss=0.01"),
    ],
    ids=["odd", "shared-kv", "untied-smoothed"],
)
def test_odd_sizes(tmp_path, model):
    plain = tuple(m for m in model if not m.startswith("parallel."))
    assert_same(train(tmp_path, *SGD, *model, "parallel.data=1", "parallel.tensor=2", evaluate=True), reference(*SGD, *plain))


def test_recompute_and_narrow_numbers(tmp_path):
    more = ("precision=bf16", "recompute=full")
    layout = ("parallel.data=2", "parallel.tensor=2", "+strategy=zero3")
    got = train(tmp_path, *more, *layout, *SEQUENCE)["losses"]
    assert got == pytest.approx(reference()["losses"], rel=1e-2)


def test_a_hugging_face_model_trains(tmp_path):
    model = ("model=hf", "+model.options.model_type=qwen2", "model.kv_heads=2", "model.dropout=0")
    layout = ("parallel.data=2", "parallel.tensor=2", "+strategy=zero3")
    assert_same(train(tmp_path, *SGD, *model, *layout, evaluate=True, steps=6), reference(*SGD, *model, steps=6))


# ------------------------------------------------------------------ refused before launch


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["parallel.tensor=3"], "parallel.tensor", "Legal values of parallel.tensor: 1, 2, 4"),
        (
            ["model=llama", "model.kv_heads=2", "parallel.tensor=4"],
            "parallel.tensor",
            "1, 2; more with parallel.replicate_kv=true",
        ),
        (["model.ffn=1", "parallel.tensor=2"], "parallel.tensor", "has 1 to share among 2 ranks"),
        (["parallel.tensor=2", "parallel.styles=['blocks.*.mlp.up=colwize']"], "parallel.styles", "colwise"),
        (["parallel.tensor=2", "parallel.styles=['blocks.*.mlp.upp=colwise']"], "parallel.styles", "no module with weights fits"),
        (["parallel.tensor=2", "parallel.styles=['blocks.*.mlp.up=packed:3,4']"], "parallel.styles", "make 7"),
        (
            ["parallel.tensor=2", "parallel.sequence_parallel=true", "data.sequence=15"],
            "parallel.sequence_parallel",
            "multiple of 2",
        ),
        (
            ["parallel.tensor=2", "model=hf", "+model.options.model_type=opt", "model.dropout=0"],
            "parallel.tensor",
            "declares no tensor plan",
        ),
        (
            ["parallel.tensor=2", "model=hf", "+model.options.model_type=mixtral", "model.dropout=0"],
            "parallel.styles",
            "packed_colwise",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_with_legal_values(overrides, key, text):
    found = [p for p in planned("parallel.data=1", *overrides)[0].problems if p.key == key]
    assert found and text in found[0].reason + found[0].remedy, found
