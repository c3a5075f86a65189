"""Wire formats: a flat tensor as a packet of bytes and back. Values are in blocks with a float32 scale each; see `partita_kernels`.

A packet holds the values first and the scales after them; both begin at multiples of 4 bytes as long as the elements are a multiple
of 64, which the state layout guarantees for shards.
"""

from __future__ import annotations

from typing import Protocol

import torch

from partita_kernels import quantize, signs


class Format(Protocol):
    """How elements travel."""

    name: str

    def size(self, n: int) -> int:
        """Bytes of a packet of n elements, scales included."""

    def encode(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """x: contiguous 1-D float [n]. packet: uint8 [size(n)], written."""

    def decode(self, packet: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """out: contiguous 1-D float [n], written, or added to in float32. A block that held a NaN or Inf comes back not finite."""


class Blocks:
    """Codes of 8 or 4 bits with a scale for 256 elements: 1.016 or 0.516 bytes an element. kernel: name in `partita_kernels.quantize`."""

    block = 256

    def __init__(self, name: str, kernel: str) -> None:
        self.name, self.kernel = name, kernel
        self._format = quantize.find(kernel)

    def size(self, n: int) -> int:
        """See `Format`."""
        return self._codes(n) + 4 * -(-n // self.block)

    def _codes(self, n: int) -> int:
        return -(-n // self._format.per_byte // 4) * 4

    def _parts(self, packet: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = packet[: -(-n // self._format.per_byte)].view(self._format.dtype)
        return codes, packet[self._codes(n) :].view(torch.float32)

    def encode(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """See `Format`."""
        codes, scales = self._parts(packet, x.numel())
        quantize.quantize_blocks_([x], [codes], [scales], self.kernel, self.block)

    def decode(self, packet: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """See `Format`."""
        codes, scales = self._parts(packet, out.numel())
        quantize.dequantize_blocks_([codes], [scales], [out], self.kernel, self.block, add)


class OneBit:
    """The sign, and the mean magnitude of 1024 elements: 0.129 bytes an element (1-bit SGD, Seide et al. 2014)."""

    name, block = "onebit", 1024

    def size(self, n: int) -> int:
        """See `Format`."""
        return -(-n // 32) * 4 + 4 * -(-n // self.block)

    def _parts(self, packet: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = -(-n // 32) * 4
        return packet[: -(-n // 8)], packet[values:].view(torch.float32)

    def encode(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """See `Format`."""
        bits, scales = self._parts(packet, x.numel())
        signs.PACK.on(x.device)(x, None, bits, scales, self.block)

    def decode(self, packet: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """See `Format`."""
        bits, scales = self._parts(packet, out.numel())
        signs.UNPACK.on(out.device)(bits, scales, out, self.block, add)


FORMATS: dict[str, Format] = {
    f.name: f for f in (Blocks("int8", "int8"), Blocks("int4", "int4"), Blocks("fp8", "fp8_e4m3"), OneBit())
}
