"""Hugging Face models, unmodified, in a pipeline and in three axes: logits, norm and all gradients are those of the dense model."""

from __future__ import annotations

import os
from pathlib import Path

import against_dense
import pytest
from layouts import spec_of
from packed import packed
from pool import run_ranks

KINDS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama": ("model.kv_heads=2",),
    "qwen2": ("model.kv_heads=2",),
    "mistral": ("model.kv_heads=2", "+model.options.sliding_window=null"),
    "bert": (),
    "phi": (),
}
LAYOUTS = {
    "tensor 2": ("parallel.data=1", "parallel.tensor=2", "train.micro_batch=4"),
    "pipeline 2": ("parallel.data=1", "parallel.pipeline=2", "train.micro_batch=2"),
    "2 x 2 x 2": ("parallel.pipeline=2", "parallel.data=2", "parallel.tensor=2", "train.micro_batch=2", "+strategy=zero3"),
}
LONG = pytest.mark.skipif(
    "PARTITA_LONG_TESTS" not in os.environ, reason="8 ranks import transformers: PARTITA_LONG_TESTS=1 runs it"
)


@pytest.mark.parametrize("layout", ["tensor 2", "pipeline 2", pytest.param("2 x 2 x 2", marks=LONG)])
def test_a_model_in_a_layout_is_the_dense_one(tmp_path: Path, layout: str) -> None:
    specs = {
        kind: spec_of(tmp_path / kind, "model=hf", f"+model.options.model_type={kind}", "model.dropout=0", "model.vocab=301",
                      *more, *LAYOUTS[layout])
        for kind, more in KINDS.items()
    }  # fmt: skip
    ranks = next(iter(specs.values())).ranks
    found = zip(*run_ranks(ranks, packed, against_dense.compare, [(s,) for s in specs.values()], timeout=170), strict=True)
    assert {kind: wrong for kind, wrong in zip(specs, found, strict=True) if any(wrong)} == {}
