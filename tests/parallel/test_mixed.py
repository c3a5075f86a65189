"""Tensor, sequence, context, pipeline and data axes in one mesh, against one rank."""

from __future__ import annotations

import pytest
from layouts import assert_same, reference, train

SGD = ("optimizer=sgd", "optimizer.lr=0.05", "train.grad_clip=0")
HF = ("model=hf", "+model.options.model_type=qwen2", "model.kv_heads=2", "model.dropout=0")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ((), ("parallel.data=1", "parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence_parallel=true", "train.micro_batch=2")),
        ((), ("parallel.data=1", "parallel.pipeline=2", "parallel.context=2", "train.micro_batch=2")),
        (HF, ("parallel=3d", "+strategy=zero3", "train.micro_batch=1")),
    ],
    ids=["pipeline-sequence", "pipeline-context", "hf-3d-zero3"],
)  # fmt: skip
def test_losses_and_norms_are_those_of_one_rank(tmp_path, model, layout):
    assert_same(train(tmp_path, *SGD, *model, *layout, steps=6, evaluate=True), reference(*SGD, *model, steps=6))
