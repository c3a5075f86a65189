"""Adapters as peft stores them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from partita.models.hf import PREFIX
from partita_adapter.layers import DEFAULT, adapted_layers, find_targets, matches, transposed
from partita_adapter.weights import BASE, CONFIG, WEIGHTS, piece_of


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
            whole = owner.engine.full_tensor(binding.name).cpu()  # every rank takes part
            key = piece.key if piece is not None else BASE + binding.name.removeprefix(PREFIX)
            tensors[key] = whole.contiguous()
    if owner.rank == 0:
        _write(folder, settings(owner.model, owner.config), tensors)
    return folder


def settings(model: Any, config: Any) -> dict[str, Any]:
    """peft's adapter_config.json."""
    a = config.adapter
    names = [n.removeprefix(PREFIX) for n in find_targets(model, a.targets)]
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
        "target_modules": sorted(names),
        "modules_to_save": sorted(a.extra) or None,
        "use_rslora": a.rslora,
        "use_dora": a.dora,
        "fan_in_fan_out": any(transposed(layer) for layer in adapted_layers(model)),
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
