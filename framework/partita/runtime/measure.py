"""Measures a machine: arithmetic, memory, links. Every figure is a median over repetitions after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from partita.runtime.device import Device

DTYPES = ("float32", "bfloat16", "float16")
SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 21, 1 << 23)  # bytes of messages
BUDGET = 0.4  # seconds for each figure


def timed(device: Device, work: Callable[[], object], budget: float = BUDGET) -> float:
    """Median seconds of `work`, device included."""
    work()
    device.synchronize()
    spent: list[float] = []
    started = time.perf_counter()
    while len(spent) < 3 or (time.perf_counter() - started < budget and len(spent) < 200):
        begun = time.perf_counter()
        work()
        device.synchronize()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def matmul_flops(device: Device, dtype: str) -> float:
    """FLOP/s of a large square matrix product."""
    size = 512 if device.torch_device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device.torch_device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / timed(device, lambda: torch.matmul(a, b, out=out))


def memory_bandwidth(device: Device) -> float:
    """Bytes/s of an elementwise sum: two arrays read, one written, larger than caches."""
    count = 1 << (24 if device.torch_device.type == "cpu" else 28)
    a, b = (torch.ones(count, device=device.torch_device) for _ in range(2))
    out = torch.empty_like(a)
    return 3 * 4 * count / timed(device, lambda: torch.add(a, b, out=out))


def host_bandwidth(device: Device) -> float | None:
    """Bytes/s of a copy from pinned host memory; None where arithmetic runs on the host itself."""
    if device.torch_device.type == "cpu":
        return None
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device.torch_device)
    return source.numel() / timed(device, lambda: target.copy_(source, non_blocking=True))


class _Tiny(nn.Module):
    """A block with as many operations as a real one, and next to no work in each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p.view(1, 8, 2, 8).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(1, 8, 16))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def block_overhead(device: Device) -> float:
    """Seconds of forward and backward of a block of no size."""
    block = _Tiny().to(device.torch_device)
    x = torch.ones(1, 8, 16, device=device.torch_device, requires_grad=True)
    return timed(device, lambda: block(x).sum().backward())


def fit_link(sizes: Sequence[float], seconds: Sequence[float], hops: float) -> tuple[float, float]:
    """(bytes/s, seconds of a hop) from times of messages: least squares of relative errors, both at least a little above zero.

    sizes: bytes that a rank sends. t = hops x alpha + size / beta.
    """
    weights = [1 / t for t in seconds]
    a11 = sum((w * hops) ** 2 for w in weights)
    a12 = sum(w * w * hops * s for w, s in zip(weights, sizes, strict=True))
    a22 = sum((w * s) ** 2 for w, s in zip(weights, sizes, strict=True))
    b1 = sum(w * w * hops * t for w, t in zip(weights, seconds, strict=True))
    b2 = sum(w * w * s * t for w, s, t in zip(weights, sizes, seconds, strict=True))
    det = a11 * a22 - a12 * a12
    alpha, inverse = (b1 * a22 - b2 * a12) / det, (a11 * b2 - a12 * b1) / det
    if alpha <= 0 or inverse <= 0:  # noise: the largest message tells the bandwidth, the smallest the latency
        return max(sizes) / max(seconds), min(seconds) / hops
    return 1 / inverse, alpha


def measure_link(device: Device, group: dist.ProcessGroup | None, ranks: int, hops: float) -> tuple[float, float]:
    """(bytes/s, seconds of a hop) of sums over a group; every rank of it calls this."""
    sent, seconds = [], []
    for size in SIZES:
        buffer = torch.zeros(size // 4, device=device.torch_device)
        repeats = 20 if size <= 1 << 16 else 6
        dist.all_reduce(buffer, group=group)
        spent = []
        for _ in range(3):
            dist.barrier(group=group)
            device.synchronize()
            begun = time.perf_counter()
            for _ in range(repeats):
                dist.all_reduce(buffer, group=group)
            device.synchronize()
            spent.append((time.perf_counter() - begun) / repeats)
        slowest = torch.tensor([min(spent)], dtype=torch.float64)
        sent.append(2 * size * (ranks - 1) / ranks)
        seconds.append(float(_largest(slowest, device, group)))
    return fit_link(sent, seconds, hops)


def _largest(value: torch.Tensor, device: Device, group: dist.ProcessGroup | None) -> torch.Tensor:
    moved = value.to(device.torch_device, dtype=torch.float32)
    dist.all_reduce(moved, dist.ReduceOp.MAX, group=group)
    return moved
