"""AdamW with states in the formats of torchao: 8 bits (Dettmers et al. 2022) and 4 bits (Li et al. 2023), codes of a table with block scales.

Its functions quantise flat ranges; the whole update is one function that torch.compile fuses. torchao's own optimizers keep float32 states for
tensors whose size is no multiple of a block; here the last block of such a tensor is filled up.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from partita.errors import ConfigError
from partita.plugin.wording import complaint
from partita.state.optimizers import BLOCK, Rule, State, Update

Tensor = torch.Tensor


class Moment(NamedTuple):
    """Codes, scales and the table of values of the codes."""

    codes: Tensor
    scales: Tensor
    table: Tensor


@dataclass(frozen=True)
class TorchaoAdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with moments of `bits` bits: 2.03 or 1.06 bytes for each weight."""

    beta1: float
    beta2: float
    eps: float
    bits: int
    policy = "block"

    def states(self) -> tuple[str, ...]:
        """Names of their own: other rules' codes mean other values."""
        return tuple(f"torchao{self.bits}_{name}" for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"))

    def formats(self) -> dict[str, State]:
        """See `Rule`."""
        codes, scales = State("uint8", 8 // self.bits), State("float32", block_of(self.bits))
        return dict(zip(self.states(), (codes, codes, scales, scales), strict=True))

    def update(self, update: Update, *, step: int, lr: float, weight_decay: float, scale: Tensor) -> None:
        """See `Rule`."""
        corrections = 1 - self.beta1**step, 1 - self.beta2**step
        numbers = torch.tensor([lr, 1 - lr * weight_decay, *corrections], dtype=torch.float32).to(scale.device, non_blocking=True)
        hyper, per_byte, block = (self.beta1, self.beta2, self.eps), 8 // self.bits, block_of(self.bits)
        states, signs = [update.states[name] for name in self.states()], (True, False)
        for i, (p, g, copy) in enumerate(zip(update.master, update.gradients, update.copies, strict=True)):
            moments = [Moment(states[m][i], states[m + 2][i], _table(self.bits, signs[m], p.device)) for m in (0, 1)]
            whole = p.numel() // BLOCK * BLOCK
            if whole:
                head = [Moment(m.codes[: whole // per_byte], m.scales[: whole // block], m.table) for m in moments]
                _compiled()(p[:whole], g[:whole], scale, *head, numbers, hyper)
            if whole < p.numel():
                rest = [Moment(m.codes[whole // per_byte :], m.scales[whole // block :], m.table) for m in moments]
                _last_block(p[whole:], g[whole:], scale, rest, numbers, hyper, self.bits)
            if copy is not None:
                copy.copy_(p)


def block_of(bits: int) -> int:
    """Elements with one scale: torchao's defaults."""
    return {8: 256, 4: 128}[bits]


def _last_block(
    p: Tensor, g: Tensor, scale: Tensor, moments: list[Moment], numbers: Tensor, hyper: tuple[float, ...], bits: int
) -> None:
    """Of less than BLOCK elements, with zeros behind them; code 0 is no zero."""
    ends = BLOCK * bits // 8, BLOCK // block_of(bits)
    zeros = [_zero(bits, signed) for signed in (True, False)]
    filled = [Moment(_fill(m.codes, ends[0], z), _fill(m.scales, ends[1]), m.table) for m, z in zip(moments, zeros, strict=True)]
    whole = _fill(p, BLOCK)
    _compiled()(whole, _fill(g, BLOCK), scale, *filled, numbers, hyper)
    p.copy_(whole[: p.numel()])
    for to, changed in zip(moments, filled, strict=True):
        to.codes.copy_(changed.codes[: to.codes.numel()])
        to.scales.copy_(changed.scales[: to.scales.numel()])


def _fill(t: Tensor, size: int, value: int = 0) -> Tensor:
    return pad(t, (0, size - t.numel()), value=value)


@functools.cache
def _zero(bits: int, signed: bool) -> int:
    """A byte of codes that stand for zero, or for the least there is."""
    code = int(_table(bits, signed, torch.device("cpu")).abs().argmin())
    return code if bits == 8 else code << 4 | code


def _step(
    p: Tensor, g: Tensor, scale: Tensor, first: Moment, second: Moment, numbers: Tensor, hyper: tuple[float, float, float]
) -> None:
    """One update of whole blocks, in place. numbers: lr, what decay leaves of a weight, bias corrections of both moments."""
    beta1, beta2, eps = hyper
    lr, keep, correction1, correction2 = numbers.unbind()
    g = g.float() * scale
    m = _decode(first).lerp(g, 1 - beta1)
    v = _decode(second).lerp(g.square(), 1 - beta2)
    _encode(m, first)
    _encode(v, second)
    p.copy_(p * keep - lr * (m / correction1) / ((v / correction2).sqrt() + eps))


def _decode(x: Moment) -> Tensor:
    from torchao.optim.quant_utils import dequant_with_qmap

    codes = x.codes if len(x.table) > 16 else torch.stack([x.codes >> 4, x.codes & 15], -1).view(-1)
    return dequant_with_qmap(codes, x.table, x.scales)


def _encode(values: Tensor, x: Moment) -> None:
    from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap, scale_tensor

    scaled, scales = scale_tensor(values, values.numel() // x.scales.numel())
    x.scales.copy_(scales)
    if len(x.table) > 16:
        x.codes.copy_(quantize_8bit_with_qmap(scaled, x.table))
    else:
        pairs = quantize_4bit_with_qmap(scaled, x.table).view(-1, 2)
        x.codes.copy_(pairs[:, 0] << 4 | pairs[:, 1])


@functools.cache
def _compiled() -> Callable[..., None]:
    """One for all sizes."""
    return torch.compile(_step, fullgraph=True, dynamic=True)


@functools.cache
def _table(bits: int, signed: bool, device: torch.device) -> Tensor:
    """Values of the codes in ascending order."""
    from torchao.optim import subclass_4bit, subclass_8bit

    of = subclass_8bit if bits == 8 else subclass_4bit
    return torch.tensor(of.get_qmap_signed() if signed else of.get_qmap_unsigned(), dtype=torch.float32, device=device)


def _make(config: Any, bits: int) -> Rule:
    if importlib.util.find_spec("torchao") is None:
        remedy = "pip install 'partita[torchao]', or choose optimizer=adamw8bit, which needs nothing."
        raise ConfigError(complaint(f"optimizer=torchao_adamw{bits}bit: torchao isn't installed", remedy))
    return TorchaoAdamW(config.betas[0], config.betas[1], config.eps, bits)


def make_torchao_adamw8bit(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return _make(config, 8)


def make_torchao_adamw4bit(config: Any) -> Rule:
    """`config` is the optimizer node."""
    return _make(config, 4)
