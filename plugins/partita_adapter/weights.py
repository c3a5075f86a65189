"""First values of adapters: drawn by seed and name, or read from peft's files; the base's own source serves all other names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.errors import ConfigError
from partita.models.hf import PREFIX
from partita.runtime.rng import name_generator
from partita.state.parts import Part
from partita_adapter.layers import PIECES
from partita_adapter.quantized import format_of, pack

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model.model."

Read = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """A name such as `blocks.0.attention.qkv.lora_A.default.weight`, taken apart."""

    layer: str
    kind: str
    label: str

    @property
    def key(self) -> str:
        """Its name in peft's files."""
        tail = "" if self.kind == PIECES[2] else ".weight"
        return f"{BASE}{self.layer.removeprefix(PREFIX)}.{self.kind}{tail}"


def piece_of(name: str) -> Piece | None:
    """The piece of an adapter that a parameter is, if it is one."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in PIECES and i + 1 < len(parts):
            return Piece(".".join(parts[:i]), part, parts[i + 1])
    return None


@dataclass
class Values:
    """Values by name. base: of the model's own parameters. shapes: of the layers' matrices. folders: label -> peft's files."""

    seed: int
    base: Read
    shapes: dict[str, tuple[int, ...]]
    turned: dict[str, bool]
    folders: dict[str, Path] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    label: str = "default"

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A whole parameter."""
        held = format_of(name)
        if held is not None:
            layer = name.rpartition(".")[0]
            matrix = self.base(f"{layer}.weight", self.shapes[layer])
            return pack(matrix.t() if self.turned[layer] else matrix, *held)
        piece = piece_of(name)
        if piece is None:
            stored = self._stored(self.label, f"{BASE}{name.removeprefix(PREFIX)}") if self._is_extra(name) else None
            return self.base(name, shape) if stored is None else stored
        stored = self._stored(piece.label, piece.key)
        if stored is not None:
            return stored
        if piece.label in self.folders:
            raise ConfigError(
                f"adapter: {self.folders[piece.label] / WEIGHTS} has no {piece.key}\n    -> adapter.targets of that adapter"
            )
        return self._drawn(name, piece, shape)

    def part(self, name: str, part: Part) -> torch.Tensor | None:
        """A part of a parameter of the base alone, where its source can read that."""
        reader = getattr(self.base, "part", None)
        if reader is None or piece_of(name) is not None or format_of(name) is not None or self._is_extra(name):
            return None
        found: torch.Tensor | None = reader(name, part)
        return found

    def _is_extra(self, name: str) -> bool:
        return any(name.startswith(prefix + ".") for prefix in self.extra)

    def _drawn(self, name: str, piece: Piece, shape: tuple[int, ...]) -> torch.Tensor:
        """A by the uniform rule of nn.Linear (Kaiming with a = sqrt 5), B zero, magnitudes the lengths of W's rows."""
        value = torch.zeros(shape, dtype=torch.float32)
        if piece.kind == PIECES[0]:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=name_generator(self.seed, name))
        elif piece.kind == PIECES[2]:
            matrix = self.base(f"{piece.layer}.weight", self.shapes[piece.layer]).float()
            value = torch.linalg.vector_norm(matrix, dim=0 if self.turned[piece.layer] else 1)
        return value

    def _stored(self, label: str, key: str) -> torch.Tensor | None:
        folder = self.folders.get(label)
        if folder is None:
            return None
        from safetensors import safe_open

        with safe_open(folder / WEIGHTS, "pt") as file:
            return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118


def read_settings(folder: Path) -> dict[str, Any]:
    """peft's adapter_config.json. Raises ConfigError where it is missing, or asks for what is not here."""
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise ConfigError(f"adapter.path: {folder} has no {CONFIG} with {WEIGHTS}\n    -> a folder that peft or Partita wrote")
    settings: dict[str, Any] = json.loads(path.read_text())
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"adapter.path: {path} is of type {settings.get('peft_type')!r}\n    -> an adapter of type LORA")
    for key in ("rank_pattern", "alpha_pattern"):
        if settings.get(key):
            raise ConfigError(
                f"adapter.path: {path} has a {key}; one rank for all layers is what runs here\n    -> another adapter"
            )
    return settings
