"""Puts adapters into a model that stands on meta, or is real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.errors import ConfigError, did_you_mean
from partita.runtime.rng import name_generator
from partita_adapter.layers import ALL, DEFAULT, add, find_targets, is_linear, matches, quantize, scale, transposed, use
from partita_adapter.weights import Values, piece_of, read_settings


def add_adapters(model: nn.Module, config: Any) -> nn.Module:
    """The model with its base frozen, and one adapter to train beside each target.

    Raises ConfigError for targets that match nothing, tied matrices, and files that don't fit.
    """
    a = config.adapter
    if a.rank < 1:
        raise ConfigError(f"adapter.rank: {a.rank} rows make no adapter\n    -> at least 1")
    folders = {DEFAULT: Path(a.path).expanduser()} if a.path else {}
    folders |= {label: Path(str(folder)).expanduser() for label, folder in a.others.items()}
    if a.path and DEFAULT in a.others:
        raise ConfigError(f"adapter.others: {DEFAULT!r} is the label of the adapter that is trained\n    -> another label")
    targets = _targets(model, a.targets)
    shapes = {name: tuple(model.get_parameter(f"{name}.weight").shape) for name in targets}
    base = _base(model, config.seed)
    model.requires_grad_(False)
    for label in dict.fromkeys([DEFAULT, *folders]):
        rank, factor, dora = _sizes(a, folders.get(label))
        for name in targets:
            add(model.get_submodule(name), label, rank, factor, dora)
    _train(model, a.extra)
    use(model, DEFAULT)
    values = _values(model, config, shapes, folders, base)
    if any(p.is_meta for p in model.parameters()):
        _serve(model, values)
    else:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if piece_of(name) is not None or (values.folders and parameter.requires_grad):
                    parameter.copy_(values(name, tuple(parameter.shape)))
    if a.base != "whole":
        for name in targets:
            quantize(model.get_submodule(name), a.base, compute_dtype(config))
    return model


def compute_dtype(config: Any) -> torch.dtype:
    """In which weights will be held, as far as the config tells; the check of the plan compares."""
    precision = config.precision
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    name = precision.compute or precision.name
    found = getattr(torch, names.get(name, name), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _targets(model: nn.Module, patterns: list[str]) -> list[str]:
    found = find_targets(model, patterns)
    linear = [n for n, m in model.named_modules() if is_linear(m)]
    for pattern in patterns:
        if pattern != ALL and not any(matches(n, pattern) for n in linear):
            last = {n.rpartition(".")[2] for n in linear}
            raise ConfigError(f"adapter.targets: no linear layer matches {pattern!r}\n    -> {did_you_mean(pattern, last)}")
    if not found:
        raise ConfigError(
            "adapter.targets: the model has no linear layer inside a block\n    -> names of layers: adapter.targets=[head]"
        )
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + (parameter is not None)
    tied = [n for n in found if uses[id(model.get_submodule(n).weight)] > 1]
    if tied:
        raise ConfigError(
            f"adapter.targets: the matrix of {tied[0]!r} is tied to another module, which an adapter would not change\n"
            "    -> leave it out, or model.tie_embeddings=false"
        )
    return found


def _sizes(a: Any, folder: Path | None) -> tuple[int, float, bool]:
    """(rank, factor, dora) as the config says, or as the files of another adapter do."""
    if folder is None:
        return a.rank, scale(a.alpha, a.rank, a.rslora), a.dora
    s = read_settings(folder)
    rank, factor = int(s["r"]), scale(float(s["lora_alpha"]), int(s["r"]), bool(s.get("use_rslora")))
    if str(folder) == str(a.path) and (rank, bool(s.get("use_dora"))) != (a.rank, a.dora):
        raise ConfigError(
            f"adapter.rank: {folder} has rank {rank} and dora={bool(s.get('use_dora'))}, the config {a.rank} and {a.dora}\n"
            f"    -> adapter.rank={rank} adapter.dora={str(bool(s.get('use_dora'))).lower()}"
        )
    return rank, factor, bool(s.get("use_dora"))


def _train(model: nn.Module, extra: list[str]) -> None:
    """Let the trained adapter and the extra modules have gradients."""
    for name, parameter in model.named_parameters():
        piece = piece_of(name)
        if piece is not None and piece.label == DEFAULT:
            parameter.requires_grad_(True)
    for pattern in extra:
        modules = [m for n, m in model.named_modules() if n and matches(n, pattern)]
        if not modules:
            last = {n.rpartition(".")[2] for n, _ in model.named_modules()}
            raise ConfigError(f"adapter.extra: no module matches {pattern!r}\n    -> {did_you_mean(pattern, last)}")
        for module in modules:
            module.requires_grad_(True)


def _values(model: nn.Module, config: Any, shapes: dict[str, tuple[int, ...]], folders: dict[str, Path], base: Any) -> Values:
    extra = tuple(n for n, _ in model.named_modules() if n and any(matches(n, p) for p in config.adapter.extra))
    turned = {name: transposed(model.get_submodule(name)) for name in shapes}
    return Values(config.seed, base, shapes, turned, folders, extra)


def _base(model: Any, seed: int) -> Any:
    """Values of the model's own parameters: stored, drawn, or those that it has."""
    stored, draw = getattr(model, "partita_weights", None), getattr(model, "init_parameter", None)
    if stored is not None:
        return stored
    own = dict(model.named_parameters())

    def base(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name in own and not own[name].is_meta:
            return own[name].detach()
        tensor = torch.empty(shape, dtype=torch.float32)
        assert draw is not None
        draw(name, tensor, name_generator(seed, name))
        return tensor

    return base


def _serve(model: Any, values: Values) -> None:
    """Let the model tell the values of all of its parameters, adapters included."""
    model.partita_weights = values
