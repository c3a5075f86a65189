"""The device table. Dense rates, without sparsity; bandwidths of one device, one direction."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class DeviceSpec:
    """One row.

    memory: bytes. flops: dense FLOP/s by compute dtype. intra, inter: bytes/s inside and between nodes. per_node: as usual.
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


def _tensor_core(bf16: float, fp32: float) -> dict[str, float]:
    return {"bfloat16": bf16, "float16": bf16, "float32": fp32}


# Order matters for `matches`: the first row that fits wins.
DEVICES: dict[str, DeviceSpec] = {
    "b200": DeviceSpec(
        180 * GB, _tensor_core(2250e12, 80e12), 900 * GB, 50 * GB, 8, 2000 * GB, "NVIDIA DGX B200 datasheet", ("b200",)
    ),
    "h200": DeviceSpec(
        141 * GB, _tensor_core(989.4e12, 66.9e12), 450 * GB, 50 * GB, 8, 2000 * GB, "NVIDIA H200 datasheet (SXM)", ("h200",)
    ),
    "h100": DeviceSpec(
        80 * GB, _tensor_core(989.4e12, 66.9e12), 450 * GB, 50 * GB, 8, 2000 * GB, "NVIDIA H100 datasheet (SXM5)", ("h100",)
    ),
    "a100": DeviceSpec(
        80 * GB,
        _tensor_core(312e12, 19.5e12),
        300 * GB,
        25 * GB,
        8,
        2000 * GB,
        "NVIDIA A100 80GB datasheet (SXM4)",
        ("a100", "80gb"),
    ),
    "a100_40": DeviceSpec(
        40 * GB, _tensor_core(312e12, 19.5e12), 300 * GB, 25 * GB, 8, 1000 * GB, "NVIDIA A100 40GB datasheet (SXM4)", ("a100",)
    ),
    "v100": DeviceSpec(
        32 * GB,
        {"float16": 125e12, "float32": 15.7e12},
        150 * GB,
        12.5 * GB,
        8,
        750 * GB,
        "NVIDIA V100 datasheet (SXM2)",
        ("v100",),
    ),
    "mi300x": DeviceSpec(
        192 * GB, _tensor_core(1307.4e12, 163.4e12), 448 * GB, 50 * GB, 8, 2000 * GB, "AMD Instinct MI300X datasheet", ("mi300x",)
    ),
    "mi250x": DeviceSpec(
        64 * GB,
        _tensor_core(191.5e12, 47.9e12),
        150 * GB,
        25 * GB,
        8,
        512 * GB,
        "AMD Instinct MI250X datasheet (one die)",
        ("mi250x",),
    ),
    "rtx4090": DeviceSpec(
        24 * GB,
        _tensor_core(165.2e12, 82.6e12),
        32 * GB,
        3 * GB,
        1,
        128 * GB,
        "NVIDIA Ada GPU architecture, appendix A",
        ("4090",),
    ),
    "rtx3090": DeviceSpec(
        24 * GB, _tensor_core(71e12, 35.6e12), 32 * GB, 3 * GB, 1, 128 * GB, "NVIDIA GA102 whitepaper, appendix A", ("3090",)
    ),
    # A core count and clock would be needed; nothing is guessed.
    "cpu": DeviceSpec(None, {}, None, None, 1, None, "found on the machine"),
}


def device_row(reported: str) -> str | None:
    """The row whose words are all in the name that a driver reports, or None."""
    name = reported.lower()
    return next((row for row, spec in DEVICES.items() if spec.matches and all(word in name for word in spec.matches)), None)
