"""The device table. Dense rates, without sparsity; bandwidths of one device, one direction."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class DeviceSpec:
    """One row.

    memory: bytes. flops: dense FLOP/s by compute dtype. intra, inter: bytes/s inside and between nodes. per_node: as usual.
    memory_bandwidth: bytes/s of the device's own memory. host: bytes/s to the host's.
    matches: words of the name that a driver reports, all of which must be there.
    """

    memory: float | None
    flops: dict[str, float]
    intra: float | None
    inter: float | None
    per_node: int
    host_memory: float | None
    source: str
    matches: tuple[str, ...] = ()
    memory_bandwidth: float | None = None
    host: float | None = None


def _tensor_core(bf16: float, fp32: float) -> dict[str, float]:
    return {"bfloat16": bf16, "float16": bf16, "float32": fp32}


# Order matters for `matches`: the first row that fits wins.
# Each row: memory, dense FLOP/s, bytes/s inside and between nodes (one direction: half of what datasheets add up), devices and memory
# of the usual node. Node figures are those of the DGX (or OAM platform) that the device is sold in.
DEVICES: dict[str, DeviceSpec] = {
    # NVIDIA DGX B200 datasheet: 72 PFLOPS dense FP8 (half in BF16: 2.25 each), 1,440 GB and 64 TB/s for 8, NVLink 1.8 TB/s both ways,
    # 8 x 400 Gb/s, up to 4 TB; FP32: NVIDIA Blackwell datasheet. PCIe 5.0 x16: 64 GB/s.
    "b200": DeviceSpec(
        180 * GB,
        _tensor_core(2250e12, 80e12),
        900 * GB,
        50 * GB,
        8,
        2000 * GB,
        "NVIDIA DGX B200 datasheet",
        ("b200",),
        8000 * GB,
        64 * GB,
    ),
    # NVIDIA H200 datasheet (SXM): 141 GB, 4.8 TB/s, 1,979 TFLOPS BF16 with sparsity, 67 FP32, NVLink 900 GB/s both ways.
    "h200": DeviceSpec(
        141 * GB,
        _tensor_core(989.4e12, 66.9e12),
        450 * GB,
        50 * GB,
        8,
        2000 * GB,
        "NVIDIA H200 datasheet (SXM)",
        ("h200",),
        4800 * GB,
        64 * GB,
    ),
    # NVIDIA H100 datasheet (SXM5): 80 GB, 3.35 TB/s; DGX H100 datasheet: NVLink 900 GB/s both ways, 8 x 400 Gb/s, 2 TB.
    "h100": DeviceSpec(
        80 * GB,
        _tensor_core(989.4e12, 66.9e12),
        450 * GB,
        50 * GB,
        8,
        2000 * GB,
        "NVIDIA H100 datasheet (SXM5)",
        ("h100",),
        3350 * GB,
        64 * GB,
    ),
    # NVIDIA A100 80GB datasheet (SXM4): 312 TFLOPS BF16, 19.5 FP32, 2,039 GB/s, NVLink 600 GB/s both ways, PCIe 4.0 64 GB/s both
    # ways; DGX A100 datasheet: 8 x 200 Gb/s, 2 TB.
    "a100": DeviceSpec(
        80 * GB,
        _tensor_core(312e12, 19.5e12),
        300 * GB,
        25 * GB,
        8,
        2000 * GB,
        "NVIDIA A100 80GB datasheet (SXM4)",
        ("a100", "80gb"),
        2039 * GB,
        32 * GB,
    ),
    # NVIDIA A100 40GB datasheet (SXM4): 1,555 GB/s; DGX A100 320GB: 1 TB.
    "a100_40": DeviceSpec(
        40 * GB,
        _tensor_core(312e12, 19.5e12),
        300 * GB,
        25 * GB,
        8,
        1000 * GB,
        "NVIDIA A100 40GB datasheet (SXM4)",
        ("a100",),
        1555 * GB,
        32 * GB,
    ),
    # NVIDIA V100 datasheet (SXM2): 125 TFLOPS tensor, 15.7 FP32, 900 GB/s, NVLink 300 GB/s both ways, PCIe 3.0 32 GB/s both ways;
    # DGX-1 datasheet: 4 x 100 Gb/s for 8 devices, 512 GB.
    "v100": DeviceSpec(
        32 * GB,
        {"float16": 125e12, "float32": 15.7e12},
        150 * GB,
        6.25 * GB,
        8,
        512 * GB,
        "NVIDIA V100 datasheet (SXM2)",
        ("v100",),
        900 * GB,
        16 * GB,
    ),
    # AMD Instinct MI300X datasheet: 192 GB, 5.3 TB/s, 1,307.4 TFLOPS BF16, 163.4 FP32, 7 x 128 GB/s both ways, PCIe 5.0 128 GB/s both ways.
    "mi300x": DeviceSpec(
        192 * GB,
        _tensor_core(1307.4e12, 163.4e12),
        448 * GB,
        50 * GB,
        8,
        2000 * GB,
        "AMD Instinct MI300X datasheet",
        ("mi300x",),
        5300 * GB,
        64 * GB,
    ),
    # AMD Instinct MI250X datasheet, half of it: one die is one device to the driver. Frontier's node has 8 dies, 4 x 200 Gb/s, 512 GB.
    "mi250x": DeviceSpec(
        64 * GB,
        _tensor_core(191.5e12, 47.9e12),
        150 * GB,
        12.5 * GB,
        8,
        512 * GB,
        "AMD Instinct MI250X datasheet (one die)",
        ("mi250x",),
        1600 * GB,
        36 * GB,
    ),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: 165.2 TFLOPS FP16 with FP32 sums, 82.6 FP32, 1,008 GB/s, PCIe 4.0 x16, no
    # NVLink: neighbours talk through PCIe. 25 GbE between machines.
    "rtx4090": DeviceSpec(
        24 * GB,
        _tensor_core(165.2e12, 82.6e12),
        32 * GB,
        3 * GB,
        1,
        128 * GB,
        "NVIDIA Ada GPU architecture, appendix A",
        ("4090",),
        1008 * GB,
        32 * GB,
    ),
    # NVIDIA GA102 whitepaper, appendix A: 71 TFLOPS FP16 with FP32 sums, 35.6 FP32, 936 GB/s, PCIe 4.0 x16.
    "rtx3090": DeviceSpec(
        24 * GB,
        _tensor_core(71e12, 35.6e12),
        32 * GB,
        3 * GB,
        1,
        128 * GB,
        "NVIDIA GA102 whitepaper, appendix A",
        ("3090",),
        936 * GB,
        32 * GB,
    ),
    # A CPU's rates depend on cores and clock: measured (scripts/calibrate.py), else guessed and said so (partita.plan.rates).
    "cpu": DeviceSpec(None, {}, None, None, 1, None, "found on the machine"),
}

# Seconds of one hop of a collective. NCCL's own model takes 3.4 us (NVLink) and 14 us (network) for a ring with the simple protocol
# (nccl/src/graph/tuning.cc, hwLatencies).
HOP_INTRA, HOP_INTER = 3.4e-6, 14e-6


def device_row(reported: str) -> str | None:
    """The row whose words are all in the name that a driver reports, or None."""
    name = reported.lower()
    return next((row for row, spec in DEVICES.items() if spec.matches and all(word in name for word in spec.matches)), None)
