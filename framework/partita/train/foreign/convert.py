"""A foreign checkpoint as one of ours, or as safetensors, without starting ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from partita.config.schema import ModelConfig
from partita.errors import CheckpointError, ConfigError, did_you_mean
from partita.plan.plan import Layout
from partita.runtime.mesh import Mesh
from partita.state.slices import StateSlice
from partita.train.foreign import names
from partita.train.foreign.deepspeed import is_deepspeed, read_deepspeed
from partita.train.foreign.source import Source, Translate, Weights
from partita.train.foreign.unpickle import read_pickled

# Names of the model that the result is for. as_is: names stay; hf: for model=hf, which keeps the model inside an adapter.
MODELS: dict[str, Translate] = {
    "as_is": names.bare,
    "hf": lambda weights: {f"inner.{n}": w for n, w in names.bare(weights).items()},
    "gpt": names.from_gpt2,
    "nanogpt": lambda weights: names.from_gpt2(weights, transposed=False),
    "llama": names.from_llama,
    "bert": names.from_bert,
}
CONFIGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gpt2": names.gpt2_config,
    "llama": names.llama_config,
    "bert": names.bert_config,
}


def read_source(path: Path | str) -> Source:
    """Recognise and read a foreign checkpoint, or one of ours. Raises CheckpointError where it is none that is known."""
    path = Path(path).absolute()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        return _nanogpt(path)
    if is_deepspeed(path):
        return read_deepspeed(path)
    if (path / "config.json").is_file():
        return _hugging_face(path)
    return _own(path)


def convert(source: Path | str, out: Path | str, model: str = "auto") -> tuple[Path, Source]:
    """Write a checkpoint of ours to `out/checkpoints`, from which `train.resume=OUT` goes on; returns its folder and what was read.

    model: whose names the weights get, one of MODELS; auto: as the source suggests.
    """
    read = _translate(read_source(source), model)
    from partita.train.checkpoint import Checkpointer

    states = {f"model.{n}": w for n, w in read.weights.items()} | {f"buffer.{n}": w for n, w in read.buffers.items()}
    for kind, values in read.states.items():
        states |= {f"optimizer.{n}.{kind}": w for n, w in values.items()}
    slices = [StateSlice(k, tuple(t.shape), t.dtype, 0, t.numel(), t.contiguous().view(-1)) for k, t in states.items()]
    scaler = {"value": 1.0, "good": 0, "tolerated": 0, "skipped": 0}
    extra = {
        "step": read.step,
        "engine": {"updates": read.step, "scaler": scaler},
        "data": None,
        "best": None,
        "config": _config(read),
        "left_out": {"optimizer": not read.states, "frozen": []},
        "converted": {"from": str(Path(source).absolute()), "what": read.what},
    }
    made = Checkpointer(Path(out) / "checkpoints", Mesh(Layout(), 0, torch.device("cpu")), asynchronous=False, life="converted")
    made.save(read.step, slices, extra, {})
    made.close()
    return made.path(read.step), read


def to_safetensors(source: Path | str, out: Path | str, model: str = "auto") -> tuple[Path, Source]:
    """Write the weights as `out/model.safetensors` (several files and an index above 4 GiB)."""
    from partita.models.export import save_weights

    read = _translate(read_source(source), model)
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds safetensors already\n    -> another folder")
    save_weights(read.weights, folder)
    return folder, read


def _translate(read: Source, model: str) -> Source:
    chosen = model if model != "auto" else read.model["name"] if read.model else "as_is"
    if read.what == "nanoGPT" and chosen == "gpt":
        chosen = "nanogpt"
    if chosen not in MODELS:
        raise ConfigError(f"--model: {chosen!r} is unknown\n    -> {did_you_mean(chosen, [*MODELS, 'auto'])}")
    if read.what == "Partita" and chosen != "as_is":
        raise ConfigError("--model: a checkpoint of Partita keeps its names\n    -> leave --model out")
    try:
        read.translated(MODELS[chosen])
    except KeyError as error:
        raise CheckpointError(
            f"{read.what}: the weights are not those of model {chosen!r}: {error.args[0]} is not there; "
            "--model as_is keeps the names"
        ) from error
    return read


def _config(read: Source) -> dict[str, Any] | None:
    """What `export` must know, where the model is known."""
    if read.model is None:
        return None
    fields = {f.name for f in dataclasses.fields(ModelConfig)}
    node = dataclasses.asdict(ModelConfig(**{k: v for k, v in read.model.items() if k in fields}))
    return {"model": node, "data": {"sequence": read.model.get("context")}}


# ------------------------------------------------------------------ sources


def _nanogpt(path: Path) -> Source:
    """nanoGPT's ckpt.pt, or any file of torch.save with a plain state dict."""
    content = read_pickled(path)
    if isinstance(content, dict) and isinstance(content.get("model"), dict) and isinstance(content.get("model_args"), dict):
        weights = names.bare({k: v for k, v in content["model"].items() if isinstance(v, torch.Tensor)})
        step = content.get("iter_num")
        source = Source("nanoGPT", weights, step=step if isinstance(step, int) and step >= 0 else 0)
        source.model = _known(path, names.nanogpt_config, content["model_args"])
        source.notes.append("nanoGPT's activation is the exact GELU, the reference model's the tanh form: logits differ slightly")
        source.notes.append("nanoGPT numbers its optimizer states by groups of its own; moments begin at zero")
        return source
    tensors = {k: v for k, v in content.items() if isinstance(v, torch.Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise CheckpointError(f"{path} is neither nanoGPT's ckpt.pt nor a state dict: it holds a {type(content).__name__}")
    return Source("a state dict", names.bare(tensors))


def _hugging_face(path: Path) -> Source:
    """config.json and safetensors, whole or in several files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'} can't be read: {error}") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no safetensors; save it again with save_pretrained")
    weights: Weights = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
    source = Source("Hugging Face", weights)
    if isinstance(config, dict) and isinstance(config.get("model_type"), str) and config["model_type"] in CONFIGS:
        source.model = _known(path / "config.json", CONFIGS[config["model_type"]], config)
    return source


def _known(path: Path, read: Callable[[Any], dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """The model's fields; sizes are counts."""
    try:
        model = read(config)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not as it should be: {error}") from error
    odd = [k for k, v in model.items() if k not in ("name", "rope_base", "tie_embeddings") and not isinstance(v, int | None)]
    if odd:
        raise CheckpointError(f"{path}: {odd[0]} is {model[odd[0]]!r}, and should be a count")
    return model


def _own(path: Path) -> Source:
    from partita.train.index import find_checkpoint, read_index
    from partita.train.loading import read_weights

    index = read_index(find_checkpoint(path))
    read = read_weights(index.path, tied=False)
    buffers = {k.removeprefix("buffer.") for k in index.tensors if k.startswith("buffer.")}
    return Source("Partita", {n: t for n, t in read.items() if n not in buffers}, step=index.step)
