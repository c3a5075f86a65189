"""Config node `precision`: in which numbers a run computes, keeps and sends."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LossScaleConfig:
    """Dynamic loss scale for gradients that would vanish in float16 (Micikevicius et al. 2018, section 3.2)."""

    # scale the loss; default: exactly where compute is float16
    enabled: bool | None = None
    # first scale (torch.amp.GradScaler: 65536)
    initial: float = 65536.0
    # halved, or divided by this, on overflow; multiplied by it after `interval` good steps
    factor: float = 2.0
    # good steps in a row until the scale grows
    interval: int = 2000
    # overflows in a row until the scale shrinks
    hysteresis: int = 1
    # the scale never goes below this
    minimum: float = 1.0
    # false: the scale stays at `initial`
    dynamic: bool = True


@dataclass
class PrecisionConfig:
    """A row of the table in strategy.py by name, with any dtype written out by hand (float32, bfloat16, float16)."""

    # fp32, bf16, fp16
    name: str = "fp32"
    # weights and activations of forward and backward; default: the row's
    compute: str | None = None
    # sum over micro-batches; default: float32
    gradient: str | None = None
    # on the wire of the gradient reduction; sums are made in float32 all the same; default: the row's
    reduce: str | None = None
    # weights that the optimizer updates; default: float32
    master: str | None = None
    # moments of the optimizer; default: float32
    optimizer: str | None = None
    # used with float16 unless switched
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
