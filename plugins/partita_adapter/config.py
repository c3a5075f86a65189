"""Config node `adapter`: which small matrices are trained in place of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AdapterConfig:
    """Low-rank adapters (Hu et al. 2021): y = W x + s B A x, with W frozen."""

    # none: the whole model is trained; lora
    name: str = "none"
    # rows of A and columns of B
    rank: int = 8
    # s = alpha / rank, with rslora alpha / sqrt(rank)
    alpha: float = 16.0
    # all-linear: every linear layer inside a block; else names of modules, matched from their end or as shell patterns
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    # scale by the square root of the rank (Kalajdzievski 2023)
    rslora: bool = False
    # train length and direction of each row of W apart (Liu et al. 2024, DoRA)
    dora: bool = False
    # how the frozen matrices beside adapters are held: whole (in the compute dtype), int8, nf4 (Dettmers et al. 2023, QLoRA)
    base: str = "whole"
    # modules that are trained as a whole besides, by name as in targets (peft: modules_to_save)
    extra: list[str] = field(default_factory=list)
    # folder with an adapter to begin with, in peft's format
    path: str | None = None
    # further adapters over the same base, frozen: label -> folder in peft's format
    others: dict[str, Any] = field(default_factory=dict)
