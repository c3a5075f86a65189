"""Config node `zero`: over which data axes each state is cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ZeroConfig:
    """A row of the preset table (presets.py), by stage or by name, with any of its cells written out by hand."""

    # stage of ZeRO, 0 to 3; 0: every state whole on every rank (Rajbhandari et al. 2020, section 5); auto: the planner's choice
    stage: int | str = 0
    # a row by name instead of a stage: ddp, zero1, zero2, zero3, hsdp, hpz, hfsdp; default: the row of `stage`
    preset: str | None = None
    # mesh axes (replicate, shard) that cut the stored weights; default: the preset's; []: whole on every rank
    parameters: list[str] | None = None
    # mesh axes that cut the gradients between micro-batches; default: the preset's
    gradients: list[str] | None = None
    # mesh axes that cut master weights and moments; must contain the two above; default: the preset's
    optimizer: list[str] | None = None
    # ranks of one shard group, the rest replicate it: a count, or `node` for the ranks of a node; default: all data ranks.
    # MiCS calls it partition group size (Zhang et al. 2022, section 3)
    shard_size: int | str | None = None
    # units gathered ahead of the one that computes, where parameters are cut; one hides the gather and costs one unit of memory
    prefetch: int = 1
    # bytes of gathered weights held at once, at most: `prefetch` shrinks to fit; default: what `prefetch` needs
    max_gathered: int | None = None
