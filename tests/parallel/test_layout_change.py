"""A checkpoint of one layout goes on in any other: weights, moments and losses are those of the run that never stopped."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from layouts import assert_same, reference, train

from partita.train.loading import read_weights

LLAMA = ("model=llama", "model.kv_heads=2", "model.vocab=301", "model.ffn=70")  # vocabulary and inner size don't divide evenly
LAYOUTS = {
    "one": ("parallel.data=1",),
    "tensor2-zero3": ("parallel.data=2", "parallel.tensor=2", "+strategy=zero3"),
    "tensor4-kv": ("parallel.data=1", "parallel.tensor=4", "parallel.replicate_kv=true", "parallel.sequence_parallel=true"),
    "zero1": ("parallel.data=2", "+strategy=zero1"),
    "context2-tensor2": ("parallel.data=1", "parallel.tensor=2", "parallel.context=2"),
}


@lru_cache(maxsize=1)
def saved() -> tuple[TemporaryDirectory[str], dict[str, Path]]:
    """Checkpoints after 4 updates, of two layouts."""
    keep = TemporaryDirectory()
    out = {}
    for name in ("tensor2-zero3", "one"):
        out[name] = Path(keep.name) / name
        train(out[name], *LLAMA, *LAYOUTS[name], steps=4, save=True)
    return keep, out


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_next_losses_are_those_of_a_run_that_went_on(tmp_path, name):
    source = saved()[1]["tensor2-zero3"] / "checkpoints"
    (step,) = source.glob("step-*")
    got = train(tmp_path, *LLAMA, *LAYOUTS[name], f"train.resume={step}", steps=10, evaluate=False)
    whole = reference(*LLAMA, steps=14)
    assert_same(got, {key: whole[key][4:] for key in ("losses", "norms")})


def test_a_checkpoint_holds_global_tensors_whoever_wrote_it():
    first, second = (read_weights(saved()[1][name] / "checkpoints") for name in ("tensor2-zero3", "one"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=2e-5, rtol=0)


def test_one_rank_of_a_checkpoint_of_one_goes_on_with_tensor_ranks(tmp_path):
    (step,) = (saved()[1]["one"] / "checkpoints").glob("step-*")
    got = train(tmp_path, *LLAMA, *LAYOUTS["tensor2-zero3"], f"train.resume={step}", steps=10)
    whole = reference(*LLAMA, steps=14)
    assert_same(got, {key: whole[key][4:] for key in ("losses", "norms")})
