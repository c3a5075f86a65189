"""Checkpoints of DeepSpeed, Hugging Face and nanoGPT taken over exactly; nothing in them is executed."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "models")]

import commands
from small_models import VOCAB, build, make_config, spread

from partita import cli
from partita.errors import CheckpointError, ConfigError
from partita.models.export import export_hf
from partita.train.checkpoint import inspect, load_slices, read_weights
from partita.train.foreign.convert import convert, read_source, to_safetensors

DEEPSPEED = Path(__file__).parent / "data" / "deepspeed.tar.xz"  # made by data/make_deepspeed.py


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


# ------------------------------------------------------------------ Hugging Face


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt", {}), ("gpt", {"tie_embeddings": False, "ffn": 48}), ("llama", {"kv_heads": 2}), ("llama", {"tie_embeddings": False}), ("bert", {})],
    ids=str,
)  # fmt: skip
def test_a_folder_of_hugging_face(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """What was exported comes back bit for bit, under our names, with the config that goes with it."""
    model = spread(build(name, **options))
    node = make_config(name, **options).model
    node.context = 16
    export_hf(node, state_of(model), tmp_path / "hf")
    _, read = convert(tmp_path / "hf", tmp_path / "out")
    got, wanted = read_weights(tmp_path / "out"), state_of(model)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    assert read.model is not None
    assert (read.model["name"], read.model["vocab"]) == (name, VOCAB)
    config = inspect(tmp_path / "out")["extra"]["config"]["model"]
    assert (config["layers"], config["width"], config["tie_embeddings"]) == (2, 32, node.tie_embeddings)


def test_names_can_stay(tmp_path: Path) -> None:
    """As safetensors under the source's own names, and as the inner model of model=hf."""
    model = spread(build("gpt"))
    node = make_config("gpt").model
    node.context = 16
    export_hf(node, state_of(model), tmp_path / "hf")
    to_safetensors(tmp_path / "hf", tmp_path / "plain", "as_is")
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()
    convert(tmp_path / "hf", tmp_path / "inner", "hf")
    assert all(n.startswith("inner.transformer.") for n in read_weights(tmp_path / "inner"))
    with pytest.raises(ConfigError, match="another folder"):
        to_safetensors(tmp_path / "hf", tmp_path / "plain")
    with pytest.raises(CheckpointError, match="not those of model 'llama'"):
        convert(tmp_path / "hf", tmp_path / "wrong", "llama")
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        convert(tmp_path / "hf", tmp_path / "wrong", "lama")


# ------------------------------------------------------------------ nanoGPT


def nanogpt(model: Any, bias: bool) -> dict[str, Any]:
    """The dict that nanoGPT saves, with the prefix that torch.compile leaves."""
    table = {"norm1": "ln_1", "norm2": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}  # fmt: skip
    state = {"transformer.wte.weight": model.tokens.weight, "transformer.wpe.weight": model.positions.weight}
    state |= {f"transformer.ln_f.{k}": getattr(model.norm, k) for k in ("weight", "bias")}
    for i in range(2):
        for ours, theirs in table.items():
            for kind in ("weight", "bias"):
                state[f"transformer.h.{i}.{theirs}.{kind}"] = model.get_parameter(f"blocks.{i}.{ours}.{kind}")
    state["lm_head.weight"] = model.tokens.weight
    kept = {f"_orig_mod.{k}": v.detach().clone() for k, v in state.items() if bias or not k.endswith("bias")}
    args = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "bias": bias, "vocab_size": VOCAB, "dropout": 0.0}
    return {
        "model": kept,
        "model_args": args,
        "iter_num": 70,
        "best_val_loss": torch.tensor(2.5),
        "config": {"lr": 1.0},
        "optimizer": {},
    }


@pytest.mark.parametrize("bias", [True, False])
def test_a_file_of_nanogpt(bias: bool, tmp_path: Path) -> None:
    """Matrices are not transposed, a head that is the embedding is stored once, absent biases are zero."""
    model = spread(build("gpt"))
    torch.save(nanogpt(model, bias), tmp_path / "ckpt.pt")
    _, read = convert(tmp_path / "ckpt.pt", tmp_path / "out")
    got, wanted = read_weights(tmp_path / "out"), state_of(model)
    if not bias:
        wanted = {n: torch.zeros_like(w) if n.endswith("bias") else w for n, w in wanted.items()}
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    assert read.step == 70
    assert inspect(tmp_path / "out")["step"] == 70


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_code_in_a_file_is_named_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "model_args": {}, "config": Evil()}, tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=r"posix\.system: reading it would run code"):
        convert(tmp_path / "ckpt.pt", tmp_path / "out")
    assert not (tmp_path / "pwned").exists()


# ------------------------------------------------------------------ DeepSpeed


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders zero1, zero2, zero3: written by DeepSpeed on 2 ranks in bf16, and the states as DeepSpeed itself gathers them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(DEEPSPEED) as archive:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # the first 3.11s have none
        archive.extractall(folder, **safely)
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_of_deepspeed(stage: int, deepspeed: Path, tmp_path: Path) -> None:
    """Masters and moments of frozen, tied and odd-sized parameters, and the buffer, are equal to the bit."""
    truth = load_file(deepspeed / f"zero{stage}" / "truth.safetensors")
    path, read = convert(deepspeed / f"zero{stage}", tmp_path / "out")
    assert read.what == f"DeepSpeed, ZeRO-{stage}"
    assert read.step == 3
    index, _ = load_slices(path, [])
    wanted = {n: t for n, t in truth.items() if n != "head.weight" and not n.startswith("head.weight.")}
    weights = read_weights(path)
    assert torch.equal(weights.pop("count"), torch.tensor([3.0, 4.0]))
    for name, tensor in wanted.items():
        base, _, kind = name.rpartition(".")
        got = read.states[kind][base] if kind in ("exp_avg", "exp_avg_sq") else weights[name]
        assert torch.equal(got, tensor), name
    assert set(weights) == {n for n in wanted if not n.endswith(("exp_avg", "exp_avg_sq"))}
    assert "optimizer.embed.weight.exp_avg" in index.tensors


def test_what_is_missing_in_a_checkpoint_of_deepspeed(deepspeed: Path, tmp_path: Path) -> None:
    shutil.copytree(deepspeed / "zero3", tmp_path / "cut")
    files = sorted((tmp_path / "cut").rglob("*optim_states.pt"))
    files[1].unlink()
    with pytest.raises(CheckpointError, match="written by 2 ranks, and the files of 1"):
        read_source(tmp_path / "cut")
    files[0].write_bytes(files[0].read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"optim_states\.pt can't be read"):
        read_source(tmp_path / "cut")


# ------------------------------------------------------------------ whole


def test_a_run_goes_on_from_what_was_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line says how to go on, and a run does; its checkpoint can be written as plain safetensors."""
    model = build("gpt", vocab=256)
    node = make_config("gpt").model
    node.context, node.vocab = 16, 256
    export_hf(node, state_of(model), tmp_path / "hf")
    assert cli.convert([str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    line = next(t for t in capsys.readouterr().out.splitlines() if t.startswith("go on with: "))
    commands.train(tmp_path / "run", *line.removeprefix("go on with: ").split(), "train.resume_optimizer=false", "train.steps=2")
    assert len(commands.metrics(tmp_path / "run")) == 2
    assert cli.convert([str(tmp_path / "run"), str(tmp_path / "plain"), "--safetensors"]) == 0
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == state_of(model).keys()
    assert cli.convert([str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 1
