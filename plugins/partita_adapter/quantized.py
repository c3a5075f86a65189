"""A frozen matrix in 8 or 4 bits (Dettmers et al. 2023, QLoRA): blocks of 64 elements with a float32 scale each.

int8: integers, absolute maximum to 127. nf4: the 16 quantiles of a normal distribution (appendix E there), absolute maximum to 1.
Scales and codes of a matrix are one row of bytes, which a parameter of the compute dtype holds as they are: the engine cuts, gathers,
offloads and saves it like any other, and never computes with it. Its name says the format and the dtype that it is held in.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from partita_kernels import dequantize_blocks_, quantize_blocks

BLOCK = 64
FORMATS = ("int8", "nf4")
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def attribute(format: str, dtype: torch.dtype) -> str:
    """Name of the parameter that holds a matrix in a format."""
    return f"base_{format}_{str(dtype).removeprefix('torch.')}"


def format_of(name: str) -> tuple[str, torch.dtype] | None:
    """(format, dtype that holds it) of a parameter with such a name; None for others."""
    words = name.rpartition(".")[2].split("_")
    if len(words) != 3 or words[0] != "base" or words[1] not in FORMATS:
        return None
    return words[1], getattr(torch, words[2])


def packed_numel(numel: int, format: str, dtype: torch.dtype) -> int:
    """Elements of `dtype` that hold a matrix of `numel` elements."""
    scales, codes = _sizes(numel, format)
    return -(-(scales + codes) // dtype.itemsize)


def _sizes(numel: int, format: str) -> tuple[int, int]:
    """Bytes of scales, and of codes."""
    return 4 * -(-numel // BLOCK), numel if format == "int8" else -(-numel // 2)


@torch.no_grad()
def pack(matrix: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """A matrix (row-major) as a 1-D tensor of `dtype`, whose bytes are scales and codes."""
    flat = matrix.detach().float().reshape(-1).contiguous()
    codes, scales = quantize_blocks(flat, "int8", BLOCK) if format == "int8" else _to_nf4(flat)
    out = torch.zeros(packed_numel(flat.numel(), format, dtype), dtype=dtype, device=flat.device)
    held, (first, second) = out.view(torch.uint8), _sizes(flat.numel(), format)
    held[:first] = scales.view(torch.uint8)
    held[first : first + second] = codes.view(torch.uint8)
    return out


def unpack(packed: torch.Tensor, format: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The matrix, in `dtype`."""
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    if packed.is_meta:
        return out
    held, (first, second) = packed.detach().view(torch.uint8), _sizes(out.numel(), format)
    scales, codes = held[:first].clone().view(torch.float32), held[first : first + second]
    if format == "int8":
        dequantize_blocks_([codes.view(torch.int8)], [scales], [out.view(-1)], "int8", BLOCK)
    else:
        _from_nf4(codes, scales, out.view(-1))
    return out


def _to_nf4(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    _, middles = _levels(flat.device)
    codes = torch.bucketize(blocks / scales.clamp_min(1e-36).unsqueeze(1), middles).to(torch.uint8)
    codes = codes.view(-1)[: flat.numel() + flat.numel() % 2]  # the last byte is whole
    return codes[0::2] | codes[1::2] << 4, scales


def _from_nf4(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    levels, _ = _levels(codes.device)
    both = torch.stack((codes & 15, codes >> 4), 1).view(-1)
    values = F.pad(levels[both.int()], (0, scales.numel() * BLOCK - both.numel()))
    out.copy_((values.view(-1, BLOCK) * scales.unsqueeze(1)).view(-1)[: out.numel()])


@lru_cache(maxsize=8)
def _levels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16 values, and the middles between them."""
    levels = torch.tensor(NF4, dtype=torch.float32, device=device)
    return levels, (levels[1:] + levels[:-1]) / 2


class _Frozen(torch.autograd.Function):
    """x W^T with a packed W, which is made whole for the product and again for the gradient of x; it is never kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, format: str, shape: tuple[int, int]) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.format, ctx.shape = format, shape
        return F.linear(x, unpack(packed, format, shape, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return grad @ unpack(packed, ctx.format, ctx.shape, grad.dtype), None, None, None


class Quantized:
    """Instead of a layer's weight [out, in]: how it is held."""

    def __init__(self, layer: nn.Module, format: str, dtype: torch.dtype, turned: bool) -> None:
        weight: Any = layer.weight
        rows, columns = weight.shape
        self.layer, self.format, self.name = layer, format, attribute(format, dtype)
        self.shape = (columns, rows) if turned else (rows, columns)
        if weight.is_meta:
            held = torch.empty(packed_numel(weight.numel(), format, dtype), dtype=dtype, device="meta")
        else:
            held = pack(weight.t() if turned else weight, format, dtype)
        del layer._parameters["weight"]
        layer.register_parameter(self.name, nn.Parameter(held, requires_grad=False))

    def matrix(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole matrix."""
        held: Any = self.layer._parameters[self.name]
        return unpack(held, self.format, self.shape, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], the layer's bias included."""
        y: torch.Tensor = _Frozen.apply(x, self.layer._parameters[self.name], self.format, self.shape)
        bias: Any = self.layer._parameters.get("bias")
        return y if bias is None else y + bias
