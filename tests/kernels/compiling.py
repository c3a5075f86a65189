"""Compiles the real launchers for GPUs that aren't here, and reads what each kernel takes: a stub stands in for Triton's driver.

python tests/kernels/compiling.py      # prints the table of docs/kernels.md (needs PYTHONPATH=kernels where partita isn't installed)
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import partita_kernels
from partita_kernels import (
    Rounding,
    flash_triton,
    glu,
    grouped,
    loss,
    norm,
    permutation,
    quantize,
    rotary,
    routing,
    signs,
    squares,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that a block may have: NVIDIA's tuning guides (163 KiB, 227 KiB), AMD's CDNA3 ISA guide (64 KiB).
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
# Bytes that a kernel may spill on a target, and no more: (kernel, target) -> bytes, with the reason.
ACCEPTED: dict[tuple[str, str], int] = {}
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Use:
    """What a compiled kernel takes: registers of a thread, bytes of spilled registers, bytes of shared memory, warps."""

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    warps: int

    def problems(self) -> list[str]:
        """What would keep it from running at full speed, or at all."""
        found = []
        if self.spilled > ACCEPTED.get((self.kernel, self.target), 0):
            found.append(f"spills {self.spilled} bytes")
        if self.shared > SHARED_LIMIT[self.target]:
            found.append(f"{self.shared} bytes of shared memory, there are {SHARED_LIMIT[self.target]}")
        if not self.target.startswith("gfx") and self.registers * 32 * self.warps > 65536:
            found.append(f"{self.warps} warps with {self.registers} registers don't fit")
        return [f"{self.kernel} on {self.target}: {text}" for text in found]


class _Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> Any:
        return self.target.arch  # keeps kernels for different targets apart in Triton's cache

    def get_current_stream(self, device: Any = None) -> int:
        return 0


@contextmanager
def compile_only(target: GPUTarget, compiled: list[tuple[str, Any]]) -> Iterator[None]:
    """Inside, launching a kernel compiles it for `target` and does no more; what was compiled is appended."""
    run, active = JITFunction.run, driver._active

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **more)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    driver.set_active(_Driver(target))
    JITFunction.run = warm
    try:
        yield
    finally:
        JITFunction.run, driver._active = run, active


def measure(name: str, target: str, kernel: Any) -> Use:
    """Read registers, spills and shared memory off the binary."""
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        fields = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", text)}
        # Scalar registers that don't fit lie in lanes of vector registers, not in memory.
        registers, spilled = fields["vgpr_count"], max(4 * fields["vgpr_spill_count"], fields["private_segment_fixed_size"])
    else:
        registers, spilled = _cubin(kernel.asm["cubin"])
    return Use(name, target, registers, spilled, kernel.metadata.shared, kernel.metadata.num_warps)


def _cubin(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack: kernels of ours have none but for spills."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    fields = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return fields["REG"], fields["STACK"] + fields["LOCAL"]


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _update(rule: str, param: torch.dtype = F32, state: torch.dtype = F32, copy: bool = True, rounding: bool = False) -> None:
    """Two ranges with numbers of their own."""
    n, states = 1 << 20, 2 if rule == "adamw" else 1
    wide = [[empty(n, dtype=state)] * 2 for _ in range(states)]
    scales = [[empty(n // 256, dtype=F32)] * 2 for _ in range(states)]
    more: dict[str, Any] = {
        "adamw": {"step": 3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        "sgd": {"momentum": 0.9, "nesterov": True},
    }.get(rule, {"beta1": 0.9, "beta2": 0.99})
    if state == torch.uint8:
        more["scales"] = scales if states == 2 else scales[0]
    with partita_kernels.using("triton"):
        getattr(partita_kernels, f"{rule}_")(
            [empty(n, dtype=param)] * 2, [empty(n)] * 2, *wide, copies=[empty(n) if copy else None] * 2, lr=[1e-3, 1e-4], weight_decay=0.1,
            scale=empty(dtype=F32), skip=empty(dtype=F32), rounding=Rounding(0, 1, [0, n]) if rounding else None, **more,
        )  # fmt: skip


def _norm(width: int) -> None:
    x, w = empty(64, width), empty(width)
    y, total, mean, rstd = norm.triton(x, x, w, None, 1e-5, False)
    norm.triton_backward(y, total, w, mean, rstd, False)


def _layer_norm() -> None:
    x, w = empty(64, 4096), empty(4096)
    y, _, mean, rstd = norm.triton(x, None, w, w, 1e-5, True)
    norm.triton_backward(y, x, w, mean, rstd, True)


def _glu(kind: int) -> None:
    x = empty(64, 4096)
    glu.triton(x, x, kind)
    glu.triton_backward(x, x, x, kind)


def _loss() -> None:
    x, y = empty(64, 50304), empty(64, dtype=torch.int64)
    options = loss.Options(label_smoothing=0.1, z_loss=1e-4)
    losses, lse = loss.triton(x, y, options)
    loss.triton_backward(losses, x, y, lse, options, x)


def _blocks(name: str) -> None:
    f = quantize.FORMATS[name]
    live = [(empty(1 << 20), empty((1 << 20) // f.per_byte, dtype=f.dtype), empty(1 << 12, dtype=F32))] * 2
    quantize.triton(live, f, 256)
    quantize.triton_back(live, f, 256, True)


def _signs() -> None:
    bits, scales = empty(1 << 17, dtype=torch.uint8), empty(1 << 10, dtype=F32)
    signs.triton(empty(1 << 20), empty(1 << 20, dtype=F32), bits, scales, 1024)
    signs.triton_back(bits, scales, empty(1 << 20), 1024, True)


def _rope() -> None:
    angle = empty(128, 64, dtype=F32)
    rotary.triton(empty(2, 32, 128, 128), angle, angle, False)


def _route(experts: int, choosing: routing.Choosing) -> None:
    x, bias = empty(64, experts), empty(experts, dtype=F32)
    chosen, gates, p = routing.triton(x, bias, choosing)
    routing.triton_backward(gates, p, x, p, chosen, choosing)


def _permute() -> None:
    experts, x, gates = empty(64, 8, dtype=torch.int64), empty(64, 4096), empty(64, 8, dtype=F32)
    permutation.triton_order(experts, 64)
    rows = permutation.triton(x, experts.view(-1), experts, gates)
    permutation.triton_back(rows, experts, gates)
    permutation.triton_dots(x, rows, experts)


def _grouped(dtype: torch.dtype) -> None:
    x, w, dy, sizes = (
        empty(8192, 4096, dtype=dtype),
        empty(8, 4096, 2048, dtype=dtype),
        empty(8192, 2048, dtype=dtype),
        empty(8, dtype=torch.int64),
    )
    grouped.triton(x, w, sizes)
    grouped.triton(dy, w.transpose(1, 2), sizes)
    grouped.triton_outer(x, dy, sizes, False)


def _attention(size: int, dtype: torch.dtype = BF16) -> None:
    q, k = empty(1, 8, 2048, size, dtype=dtype), empty(1, 2, 2048, size, dtype=dtype)
    low = empty(1, 2048, dtype=torch.int32)
    out, lse = flash_triton.triton(q, k, k, low, low, 0.1)
    flash_triton.triton_backward(out, lse, q, k, k, out, lse, low, low, 0.1)


CASES: dict[str, Callable[[], Any]] = {
    "adamw": lambda: _update("adamw"),
    "adamw, 8-bit states": lambda: _update("adamw", state=torch.uint8, rounding=True),
    "adamw, bfloat16 throughout": lambda: _update("adamw", BF16, BF16, copy=False, rounding=True),
    "sgd": lambda: _update("sgd"),
    "lion": lambda: _update("lion"),
    "squared_norm": lambda: squares.triton([empty(1 << 24)]),
    "add_rms_norm, 4096 wide": lambda: _norm(4096),
    "add_rms_norm, 16384 wide": lambda: _norm(16384),
    "layer_norm, 4096 wide": _layer_norm,
    "swiglu": lambda: _glu(0),
    "geglu, exact": lambda: _glu(2),
    "rope, 128 wide": _rope,
    "cross_entropy, 50304 classes": _loss,
    "int8 blocks of 256": lambda: _blocks("int8"),
    "int4 blocks of 256": lambda: _blocks("int4"),
    "fp8_e4m3 blocks of 256": lambda: _blocks("fp8_e4m3"),
    "sign blocks of 1024": _signs,
    "route, 8 of 256 in 8 groups": lambda: _route(256, routing.Choosing(8, routing.SIGMOID, 8, 4, 2.5)),
    "route, 2 of 64": lambda: _route(64, routing.Choosing(2, routing.GATES["softmax_chosen"])),
    "permute, 4096 wide": _permute,
    "attention, heads of 64": lambda: _attention(64),
    "attention, heads of 128": lambda: _attention(128),
    "attention, heads of 256": lambda: _attention(256),
    "attention, heads of 64, float32": lambda: _attention(64, F32),
    "grouped_matmul": lambda: _grouped(BF16),
    "grouped_matmul, float32": lambda: _grouped(F32),
}


def compile_case(case: str, target: str) -> list[Use]:
    """All kernels that a launcher of CASES starts, compiled for a target of TARGETS."""
    compiled: list[tuple[str, Any]] = []
    with compile_only(TARGETS[target], compiled):
        CASES[case]()
    return [measure(f"{case}: {name.strip('_')}", target, kernel) for name, kernel in compiled]


def main() -> None:
    """Print the table."""
    print(f"| kernel (bfloat16) | warps | {' | '.join(TARGETS)} |\n|---|---|{'---|' * len(TARGETS)}")
    for case in CASES:
        by_target = [compile_case(case, target) for target in TARGETS]
        for uses in zip(*by_target, strict=True):
            cells = [f"{u.registers} / {u.shared}" + (f", {u.spilled} spilled" if u.spilled else "") for u in uses]
            print(f"| {uses[0].kernel} | {uses[0].warps} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    main()
