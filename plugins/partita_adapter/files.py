"""Adapters as peft stores them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from partita.models.hf import PREFIX
from partita_adapter.layers import DEFAULT, PIECES, matches, transposed
from partita_adapter.quantized import format_of, unpack
from partita_adapter.weights import BASE, CONFIG, WEIGHTS, piece_of, read_settings


def save_adapter(owner: Any, folder: Path | str, label: str = DEFAULT) -> Path:
    """Write one adapter of a run or session in peft's format, whole tensors; returns the folder. Collective.

    owner: has `engine`, `model`, `config` and `rank`. The folder is replaced only when everything is written.
    """
    folder = Path(folder)
    config = owner.config.adapter
    tensors: dict[str, torch.Tensor] = {}
    for binding in owner.engine.bindings:
        piece = piece_of(binding.name)
        extra = piece is None and label == DEFAULT and any(matches(binding.name.rpartition(".")[0], e) for e in config.extra)
        if extra or (piece is not None and piece.label == label):
            whole = owner.engine.full_tensor(binding.name)  # every rank of its stage takes part
            key = piece.key if piece is not None else BASE + binding.name.removeprefix(PREFIX)
            tensors[key] = whole.contiguous()
    tensors = _of_all_stages(owner.mesh, tensors)
    if owner.rank == 0:
        named = {n.removeprefix(BASE).rpartition(f".{kind}")[0] for n in tensors for kind in PIECES if f".{kind}" in n}
        told = settings(owner.model, owner.config) | _of_other(label, config) | {"target_modules": sorted(named)}
        _write(folder, told, {name: tensor.cpu() for name, tensor in tensors.items()})
    return folder


def _of_all_stages(mesh: Any, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks of a pipeline, on each of them; only those ranks talk that rank 0 needs."""
    group = mesh.group(("pipeline",))
    if group.size == 1 or any(at for axis, at in mesh.coordinates.items() if axis != "pipeline"):
        return mine
    lists: list[Any] = [None] * group.size
    dist.all_gather_object(lists, [(n, tuple(t.shape), t.dtype) for n, t in mine.items()], group=group.process_group)
    found: dict[str, torch.Tensor] = {}
    for source, entries in zip(group.ranks, lists, strict=True):
        for name, shape, dtype in entries:
            tensor = mine[name] if source == mesh.rank else torch.empty(shape, dtype=dtype, device=mesh.device)
            dist.broadcast(tensor, source, group=group.process_group)
            found[name] = tensor
    return found


def _of_other(label: str, config: Any) -> dict[str, Any]:
    """What peft's config says of an adapter that is not the trained one: as its own files have it."""
    if label == DEFAULT:
        return {}
    own = read_settings(Path(str(config.others[label])).expanduser())
    return {k: own.get(k) for k in ("r", "lora_alpha", "use_rslora", "use_dora")} | {"modules_to_save": None}


def settings(model: Any, config: Any) -> dict[str, Any]:
    """peft's adapter_config.json, but for the names of layers."""
    a = config.adapter
    causal = config.model.name == "hf" and getattr(model, "partita_loss", "") == "causal"  # others can't generate as peft wants
    objective = "CAUSAL_LM" if causal else None
    return {
        "peft_type": "LORA",
        "task_type": objective,
        "base_model_name_or_path": config.model.path,
        "r": a.rank,
        "lora_alpha": a.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": sorted(a.extra) or None,
        "use_rslora": a.rslora,
        "use_dora": a.dora,
        "fan_in_fan_out": any(transposed(layer) for layer in model.modules()),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    part = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(part, folder)


def split(weights: Mapping[str, torch.Tensor], label: str) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """(layer -> kind -> tensor of one adapter, names of all pieces of all adapters) among whole weights."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    names = []
    for name, tensor in weights.items():
        piece = piece_of(name)
        if piece is not None:
            names.append(name)
            if piece.label == label:
                layers.setdefault(piece.layer, {})[piece.kind] = tensor
    return layers, names


def unpack_base(weights: dict[str, torch.Tensor], turned: set[str]) -> None:
    """Put whole matrices, as the model stores them, in the place of quantised ones. turned: layers that store [in, out]."""
    for name in list(weights):
        held, layer = format_of(name), name.rpartition(".")[0]
        if held is None:
            continue
        pieces = {n: t for n, t in weights.items() if n.startswith(f"{layer}.lora_")}
        inner = next(t.shape[1] for n, t in pieces.items() if ".lora_A." in n)
        outer = next(t.shape[0] for n, t in pieces.items() if ".lora_B." in n)
        matrix = unpack(weights.pop(name).to(held[1]), held[0], (outer, inner), held[1])
        weights[f"{layer}.weight"] = matrix.t().contiguous() if layer in turned else matrix


def turned_layers(config: Mapping[str, Any], layers: list[str]) -> set[str]:
    """The layers, by our names, that store their matrix as [in, out]."""
    if config["model"]["name"] != "hf":
        return set()
    from partita.config.plain import from_plain
    from partita.config.schema import ModelConfig
    from partita.models.hf import build_inner
    from partita.models.hf_config import read_config

    model = from_plain(config["model"], ModelConfig)
    with torch.device("meta"):
        inner = build_inner(read_config(model, model.vocab or 1, model.context or config["data"]["sequence"]))
    return {name for name in layers if transposed(inner.get_submodule(name.removeprefix(PREFIX)))}
