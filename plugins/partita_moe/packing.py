"""Rows on their way to experts in fewer bytes: bfloat16, or 8 bits with a float32 scale for each row. Gradients travel back alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor
TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True)
class Packing:
    """Rows [n, C] as bytes [n, width]. Rounded to nearest, each row for itself; a row that is not finite comes back so."""

    dtype: torch.dtype

    def pack(self, x: Tensor) -> Tensor:
        """uint8 [n, 2 C], or [n, C + 4]."""
        if self.dtype not in TOPS:
            return x.to(self.dtype).contiguous().view(torch.uint8)
        wide, top = x.float(), TOPS[self.dtype]
        scale = wide.abs().amax(1, keepdim=True).div_(top)
        codes = wide.div_(scale.clamp(min=1e-30)).nan_to_num_(0.0, top, -top).clamp_(-top, top)
        if self.dtype == torch.int8:
            codes.round_()
        return torch.cat([codes.to(self.dtype).view(torch.uint8), scale.view(torch.uint8)], 1)

    def width(self, columns: int) -> int:
        """Bytes of a row."""
        return columns + 4 if self.dtype in TOPS else 2 * columns

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """out: [n, C], written."""
        if self.dtype not in TOPS:
            out.copy_(packed.view(self.dtype))
            return
        codes, scale = packed[:, :-4].contiguous().view(self.dtype), packed[:, -4:].contiguous().view(torch.float32)
        out.copy_(codes.float().mul_(scale))


PACKINGS = {"bfloat16": Packing(torch.bfloat16), "int8": Packing(torch.int8), "fp8": Packing(torch.float8_e4m3fn)}
