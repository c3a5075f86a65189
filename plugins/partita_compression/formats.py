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


class Stochastic(Blocks):
    """`Blocks` of integers, rounded up or down at random so that the mean is right (Gupta et al. 2015). Noise is drawn anew from `begin`."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, name)
        self._noise = torch.Generator(device)

    def begin(self, seed: int) -> None:
        """The same noise again for the same seed and messages, so that runs can be repeated."""
        self._noise.manual_seed(seed)

    def encode(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """See `Format`."""
        (codes, scales), top = self._parts(packet, x.numel()), self._format.top
        rows = quantize.in_blocks(x, self.block).float()
        peak = rows.abs().amax(1)
        scales.copy_(torch.where(rows.isfinite().all(1), peak / top, torch.nan))
        steps = rows * torch.where(peak > quantize.TINY, top / peak, 0.0)[:, None]
        noise = torch.rand(rows.shape, generator=self._noise, device=x.device)
        values = steps.add_(noise).floor_().nan_to_num_(0.0, 0.0, 0.0).clamp_(-top, top).view(-1)[: x.numel()]
        if self._format.per_byte == 1:
            codes.copy_(values)
        else:
            pairs = quantize.in_blocks(values, 2).to(torch.int32) & 15
            codes.copy_(pairs[:, 0] | pairs[:, 1] << 4)


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


class TopK:
    """The largest `density` of each 1024 elements, as they are: 6 bytes for each that is kept (Lin et al. 2018, Deep Gradient Compression).

    By blocks, so that each rank of a sum gets as much, places need two bytes, and no tensor is left out because another one is larger.
    """

    name, block = "topk", 1024

    def __init__(self, density: float) -> None:
        self.kept = min(self.block, max(1, round(density * self.block)))

    def size(self, n: int) -> int:
        """See `Format`."""
        count = self.kept * -(-n // self.block)
        return 4 * count + -(-2 * count // 4) * 4

    def _parts(self, packet: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = -(-n // self.block)
        count = blocks * self.kept
        values, places = packet[: 4 * count].view(torch.float32), packet[4 * count : 6 * count].view(torch.int16)
        return values.view(blocks, self.kept), places.view(blocks, self.kept)

    def encode(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """See `Format`. NaN counts as the largest number there is, so it is sent."""
        values, places = self._parts(packet, x.numel())
        rows = torch.nn.functional.pad(x.float(), (0, -x.numel() % self.block)).view(-1, self.block)
        found = rows.abs().topk(self.kept, dim=1, sorted=False).indices
        values.copy_(rows.gather(1, found))
        places.copy_(found)

    def decode(self, packet: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """See `Format`."""
        n = out.numel()
        values, places = self._parts(packet, n)
        starts = torch.arange(places.shape[0], device=out.device)[:, None] * self.block
        at = (places.long() + starts).view(-1).clamp_(max=n - 1)  # what lies behind the end is zero
        wide = out if out.dtype == torch.float32 else out.float()
        if not add:
            wide.zero_()
        wide.index_add_(0, at, values.reshape(-1))
        if wide is not out:
            out.copy_(wide)


class Cast:
    """A narrower dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.name, self.dtype = str(dtype).removeprefix("torch."), dtype

    def size(self, n: int) -> int:
        """See `Format`."""
        return 2 * n

    def encode(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """See `Format`."""
        packet.view(self.dtype).copy_(x)

    def decode(self, packet: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """See `Format`."""
        values = packet.view(self.dtype)
        out.copy_(out.float() + values.float() if add else values)


FORMATS: dict[str, Format] = {
    f.name: f for f in (Blocks("int8", "int8"), Blocks("int4", "int4"), Blocks("fp8", "fp8_e4m3"), OneBit())
}
CASTS: dict[str, Format] = {f.name: f for f in (Cast(torch.bfloat16), Cast(torch.float16))}


def reduce_format(name: str, density: float, stochastic: torch.device | None = None) -> Format | None:
    """Of gradients; None where they travel in a dtype, which the engine sees to, or in a way of their own.

    density: of top-k. stochastic: round at random, on that device.
    """
    if stochastic is not None:
        return Stochastic(name, stochastic)
    return TopK(density) if name == "topk" else FORMATS.get(name)


def gather_format(name: str) -> Format | None:
    """Of weights; None: in the dtype that they have."""
    return CASTS.get(name) or FORMATS.get(name)
