"""What a device reaches, in place of what its datasheet promises: of arithmetic, of memory, of a block's fixed cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rates:
    """flops: FLOP/s reached in large matrix products by compute dtype. memory: bytes/s reached by elementwise work.

    overhead: seconds that each pass of a block costs besides (launches, small kernels). source: where the numbers come from.
    measured: whether they were measured on the machine that the plan is for.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    overhead: float = 0.0
    source: str = "unknown"
    measured: bool = False


# Shares of the datasheet that dense training reaches. The first is chosen so that the rows of Narayanan et al. 2021, table 1 (A100)
# from 145 billion parameters on are met within 10 %; tests/plan/test_published.py holds other publications against the same constants.
MATMUL_SHARE = 0.64
MEMORY_SHARE = 0.80
OVERHEAD = 150e-6  # seconds for a forward and backward pass of a block
LINK_SHARE = 0.80  # of nominal bandwidth (NCCL tests on NVLink and HDR InfiniBand reach 0.75 to 0.9)

# A core without a measurement: AVX2 at 2 to 3 GHz reaches some 50 GFLOP/s in float32; memory some 10 GB/s for all cores.
CORE_FLOPS = 40e9
HOST_MEMORY = 10e9
CPU_OVERHEAD = 1e-3
LOOPBACK = (1.0e9, 200e-6)  # bytes/s and seconds of a message between processes of one machine


def tabled(flops: Mapping[str, float], memory: float | None) -> Rates:
    """Of an accelerator, from its datasheet."""
    reached = {name: peak * MATMUL_SHARE for name, peak in flops.items()}
    return Rates(
        reached,
        memory and memory * MEMORY_SHARE,
        OVERHEAD,
        f"datasheet x {MATMUL_SHARE:.0%} (matrix products), {MEMORY_SHARE:.0%} (memory)",
    )


def guessed(cores: int) -> Rates:
    """Of a CPU that nobody has measured. A node's cores share it."""
    each = CORE_FLOPS * cores
    flops = {"float32": each, "bfloat16": each / 4, "float16": each / 8}
    return Rates(flops, HOST_MEMORY, CPU_OVERHEAD, "a guess for any CPU; scripts/calibrate.py measures")
