"""Each kernel against the copy bandwidth of this machine, plain torch, torch.compile and liger-kernel, on a CPU or an accelerator.

python scripts/bench/kernels.py [--compile] [--elements N] [--repeat R] [--threads T] [--only NAME] [--json FILE]

elements: of the tensors; far beyond the caches by default, since a copy within them is no bound: 2^26 on a CPU that has the memory (4 minutes on two
cores), 2^27 on an accelerator. Freed memory is kept by the process, as accelerators' allocators do: mapping pages anew costs more than some kernels.

bytes: what an operation has to read and write, once. of copy: its bytes per second over those of a copy of the same size, measured in turn
with it. eager: time of the same work in plain torch operations (torch.optim's fused update and F.* where there are any) over ours; compiled: the same
for torch.compile of the plain form (half a minute for each kernel the first time); liger: the same call with liger-kernel's implementation, on an
accelerator where it is installed (`pip install 'partita[liger]'`). Layers made of several kernels are in layers.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import partita_kernels as kernels
from partita.runtime.memory import keep_freed_memory

BF16, F32 = torch.bfloat16, torch.float32
WIDTH = 4096  # of rows
CLASSES = 32768
NORM, GLU, LOSS = ((name, f"{name}_backward") for name in ("norm", "glu", "cross_entropy"))
MOST = 96  # bytes for each element of what is there at once
KEPT = 2**31 - 1  # bytes of freed memory
DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")


@dataclass
class Case:
    """An operation on prepared tensors."""

    name: str
    bytes: int
    ours: Callable[[], object]
    eager: Callable[[], object] | None
    compiled: Callable[[], Callable[[], object]] | None = None  # makes what runs the plain form through torch.compile
    liger: tuple[str, ...] = ()  # operations of ours that liger-kernel has, too


def trained(
    fn: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], leaves: list[torch.Tensor], dy: list[torch.Tensor]
) -> Callable[[], object]:
    """Forward and backward of fn."""

    def run() -> object:
        out = fn(*leaves)
        return torch.autograd.grad(list(out) if isinstance(out, tuple) else [out], leaves, dy)

    return run


@dataclass
class Result:
    """Medians of interleaved runs, in seconds."""

    name: str
    bytes: int
    ours: float
    eager: float | None
    compiled: float | None
    liger: float | None
    copy: float  # of `bytes` bytes, half read and half written

    @property
    def of_copy(self) -> float:
        """Share of the copy's bandwidth."""
        return self.copy / self.ours


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def adamw_case(n: int) -> Case:
    """bfloat16 gradients and copies, float32 weights and moments."""
    p, m, v, g, c = randn(n, dtype=F32), randn(n, dtype=F32), randn(n, dtype=F32).abs(), randn(n), randn(n)
    scale = torch.full((), 0.5, device=DEVICE)
    hyper: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def ours() -> None:
        kernels.adamw_([p], [g], [m], [v], copies=[c], step=10, scale=scale, **hyper)

    def eager() -> None:
        wide = g.float().mul_(scale)
        step = torch.full((), 10.0, device=DEVICE)
        torch._fused_adamw_([p], [wide], [m], [v], [], [step], amsgrad=False, maximize=False, **hyper)
        c.copy_(p)

    def fused() -> None:
        wide = g.float() * scale
        m.mul_(0.95).add_(wide, alpha=0.05)
        v.mul_(0.95).addcmul_(wide, wide, value=0.05)
        p.mul_(1 - 1e-5).addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-4)
        c.copy_(p)

    return Case("adamw, bf16 gradient and copy", 28 * n, ours, eager, lambda: torch.compile(fused))


def adamw_wide_case(n: int) -> Case:
    """Float32 throughout."""
    p, m, v, g = randn(n, dtype=F32), randn(n, dtype=F32), randn(n, dtype=F32).abs(), randn(n, dtype=F32)
    scale = torch.ones((), device=DEVICE)
    hyper: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([p.requires_grad_()], lr=1e-4, fused=True)
    flat = p.detach()
    p.grad = g
    return Case(
        "adamw, float32",
        28 * n,
        lambda: kernels.adamw_([flat], [g], [m], [v], copies=[None], step=10, scale=scale, **hyper),
        optimizer.step,
    )


def narrow_cases(n: int) -> list[Case]:
    """Lion; AdamW with 8-bit moments and with everything in bfloat16, rounded stochastically. The ranges start at whole blocks."""
    p, m, g, c = randn(n, dtype=F32), randn(n, dtype=F32), randn(n), randn(n)
    low = [randn(n), randn(n), randn(n).abs()]
    codes = [torch.zeros(n, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = [torch.zeros(-(-n // 256), device=DEVICE) for _ in range(2)]
    one, rounding = torch.ones((), device=DEVICE), kernels.Rounding(0, 1, [0])
    adam: dict[str, Any] = {"step": 10, "lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "scale": one}
    lion: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "scale": one}

    def eight() -> None:
        states = ([codes[0]], [codes[1]])
        kernels.adamw_([p], [g], *states, copies=[c], scales=([scales[0]], [scales[1]]), rounding=rounding, **adam)

    def bf16() -> None:
        kernels.adamw_([low[0]], [g], [low[1]], [low[2]], copies=[None], rounding=rounding, **adam)

    return [
        Case("lion, bf16 gradient and copy", 20 * n, lambda: kernels.lion_([p], [g], [m], copies=[c], **lion), None),
        Case("adamw, 8-bit moments", 16 * n, eight, None),
        Case("adamw, bf16 throughout", 14 * n, bf16, None),
    ]


def norm_cases(n: int) -> list[Case]:
    """Forward and backward of the RMSNorm with residual."""
    x, r, w = randn(n // WIDTH, WIDTH), randn(n // WIDTH, WIDTH), randn(WIDTH)
    leaves = [t.clone().requires_grad_() for t in (x, r, w)]
    dy = [randn(n // WIDTH, WIDTH)] * 2

    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (WIDTH,), w, 1e-6)

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), w, w)

    def add(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms(x + r, w), x + r

    return [
        Case("rms_norm", 4 * n, lambda: kernels.rms_norm(x, w), lambda: rms(x, w), lambda: partial(torch.compile(rms), x, w), NORM),
        Case(
            "add_rms_norm, forward and backward", 16 * n, trained(kernels.add_rms_norm, leaves, dy), trained(add, leaves, dy),
            lambda: trained(torch.compile(add), leaves, dy), NORM,
        ),
        Case(
            "layer_norm", 4 * n, lambda: kernels.layer_norm(x, w, w), lambda: layer(x, w), lambda: partial(torch.compile(layer), x, w), NORM
        ),
    ]  # fmt: skip


def glu_cases(n: int) -> list[Case]:
    """SwiGLU forward, and forward with backward."""
    g, u = (randn(n // WIDTH, WIDTH).requires_grad_() for _ in range(2))
    dy = [randn(n // WIDTH, WIDTH)]

    def eager(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return F.silu(g) * u

    a, b = g.detach(), u.detach()
    return [
        Case("swiglu", 6 * n, lambda: kernels.swiglu(a, b), lambda: eager(a, b), lambda: partial(torch.compile(eager), a, b), GLU),
        Case(
            "swiglu, forward and backward", 16 * n, trained(kernels.swiglu, [g, u], dy), trained(eager, [g, u], dy),
            lambda: trained(torch.compile(eager), [g, u], dy), GLU,
        ),
    ]  # fmt: skip


def rope_case(n: int) -> Case:
    """Heads of 128."""
    x = randn(1, max(1, n // WIDTH), 32, 128).transpose(1, 2)
    cos, sin = kernels.rope_angles(torch.arange(x.shape[2], device=DEVICE), 128)
    c, s = cos.to(BF16), sin.to(BF16)

    def eager() -> torch.Tensor:
        a, z = x.chunk(2, -1)
        return torch.cat([a * c - z * s, z * c + a * s], -1)

    return Case("rope", 4 * x.numel(), lambda: kernels.rope(x, cos, sin), eager, lambda: torch.compile(eager), ("rope",))


def loss_case(n: int) -> Case:
    """Cross entropy with its gradient."""
    x = randn(max(2, n // CLASSES), CLASSES).requires_grad_()
    y = torch.randint(CLASSES, (x.shape[0],), device=DEVICE)

    one = [torch.ones((), device=DEVICE)]

    def ours(x: torch.Tensor) -> torch.Tensor:
        return kernels.cross_entropy(x, y)[0]

    def eager(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.float(), y, reduction="sum")

    mine, plain = (trained(f, [x], one) for f in (ours, eager))
    return Case(
        "cross_entropy, forward and backward", 6 * x.numel(), mine, plain, lambda: trained(torch.compile(eager), [x], one), LOSS
    )


def wire_cases(n: int) -> list[Case]:
    """int8 and one-bit formats."""
    n = -(-n // 256) * 256
    x, e = randn(n), randn(n, dtype=F32)
    q, scales = kernels.quantize_int8(x)
    bits, sizes = kernels.pack_signs(x, e)
    out = torch.empty_like(x)

    def quantize() -> object:
        v = x.view(-1, 256)
        s = v.abs().amax(1, keepdim=True).float() / 127
        return q.view(-1, 256).copy_((v / s).round()), s

    def dequantize() -> object:
        return out.view(-1, 256).copy_(q.view(-1, 256) * scales[:, None])

    def quantized(format: str, size: float) -> list[Case]:
        """Into memory that is there, as on a wire: fresh pages would cost more than the work."""
        codes, steps = kernels.quantize_blocks(x, format)
        return [
            Case(f"quantize {format}", int((2 + size) * n), lambda: kernels.quantize_blocks_([x], [codes], [steps], format), None),
            Case(f"dequantize {format}", int((2 + size) * n), lambda: kernels.dequantize_blocks_([codes], [steps], [out], format), None),
            Case(
                f"dequantize and add {format}", int((4 + size) * n),
                lambda: kernels.dequantize_blocks_([codes], [steps], [out], format, add=True), None,
            ),
        ]  # fmt: skip

    return [
        Case(
            "quantize int8",
            3 * n,
            lambda: kernels.quantize_blocks_([x], [q], [scales]),
            quantize,
            lambda: torch.compile(quantize),
        ),
        *quantized("int4", 0.5),
        *quantized("fp8_e4m3", 1),
        Case(
            "dequantize int8",
            3 * n,
            lambda: kernels.dequantize_int8(q, scales, out),
            dequantize,
            lambda: torch.compile(dequantize),
        ),
        Case("pack signs with error feedback", 10 * n, lambda: kernels.pack_signs(x, e), None),
        Case("unpack signs", 2 * n, lambda: kernels.unpack_signs(bits, sizes, out), None),
    ]


def moe_cases(n: int) -> list[Case]:
    """Routing among 64 experts, and rows of 2 choices there and back."""
    tokens = max(1, n // WIDTH)
    x, logits = randn(tokens, WIDTH), randn(tokens * 16, 64, dtype=F32)
    experts, gates, _ = kernels.route(logits[:tokens], 2)
    order = kernels.expert_order(experts, 64)
    rows = kernels.permute(x, order)

    def route(logits: torch.Tensor) -> object:
        p = logits.softmax(-1)
        best, chosen = p.topk(2)
        return chosen, best / best.sum(-1, keepdim=True), p

    def there() -> object:
        return x.index_select(0, order.slots // 2)

    def back() -> object:
        weighted = rows.float() * gates.reshape(-1)[order.slots][:, None]
        return torch.zeros(tokens, WIDTH, device=DEVICE).index_add(0, order.slots // 2, weighted).to(BF16)

    return [
        Case(
            "route",
            8 * logits.numel(),
            lambda: kernels.route(logits, 2),
            lambda: route(logits),
            lambda: partial(torch.compile(route), logits),
        ),
        Case("permute", 8 * x.numel(), lambda: kernels.permute(x, order), there, lambda: torch.compile(there)),
        Case("unpermute", 6 * x.numel(), lambda: kernels.unpermute(rows, order, gates), back, lambda: torch.compile(back)),
    ]


def squares_cases(n: int) -> list[Case]:
    """Of gradients in both formats."""
    wide, low = randn(n, dtype=F32), randn(n)
    return [
        Case("squared_norm, float32", 4 * n, lambda: kernels.squared_norm([wide]), lambda: torch.linalg.vector_norm(wide)),
        Case("squared_norm, bf16", 2 * n, lambda: kernels.squared_norm([low]), lambda: torch.linalg.vector_norm(low, dtype=F32)),
    ]


GROUPS: list[Callable[[int], Case | list[Case]]] = [
    adamw_case, adamw_wide_case, narrow_cases, squares_cases, norm_cases, glu_cases, rope_case, loss_case, wire_cases, moe_cases,
]  # fmt: skip


def default_elements() -> int:
    """So many that the tensors of the largest case lie far beyond the caches, and within memory."""
    if DEVICE.type != "cpu":
        return 1 << 27
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 1 << min(26, (there // MOST).bit_length() - 1)


def seconds(run: Callable[[], object]) -> float:
    """Of one call, the device's work included."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()


@contextmanager
def instead(implementations: dict[str, Callable[..., object]]) -> Iterator[None]:
    """Inside, these stand for operations of ours."""
    for name, implementation in implementations.items():
        kernels.replace(name, implementation)
    try:
        yield
    finally:
        for name in implementations:
            kernels.replace(name, None)


def ligers(case: Case) -> dict[str, Callable[..., object]]:
    """What liger-kernel has for a case, where it can run."""
    if DEVICE.type == "cpu" or not importlib.util.find_spec("liger_kernel"):
        return {}
    from partita.train.liger import make_liger

    return {name: make_liger(name) for name in case.liger}


def measure(case: Case, repeat: int, compiled: bool) -> Result:
    """Ours, plain torch, compiled if asked for, liger and a copy in turn, so that a busy machine slows all alike."""
    source = torch.empty(case.bytes // 2, dtype=torch.uint8, device=DEVICE).fill_(1)
    target = torch.empty_like(source)
    runs = {"ours": case.ours, "copy": lambda: target.copy_(source)}
    if case.eager is not None:
        runs["eager"] = case.eager
    if case.compiled is not None and compiled:
        torch.compiler.reset()
        runs["compiled"] = case.compiled()
    theirs = ligers(case)
    if theirs:
        runs["liger"] = case.ours
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat + 1):  # the first compiles and pages in
        for name, run in runs.items():
            with instead(theirs) if name == "liger" else nullcontext():
                times[name].append(seconds(run))
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    eager, plain, liger = (middle.get(name) for name in ("eager", "compiled", "liger"))
    return Result(case.name, case.bytes, middle["ours"], eager, plain, liger, middle["copy"])


def table(results: list[Result]) -> Table:
    """For people."""
    title = f"kernels on {DEVICE.type}, bfloat16"
    shown = Table("operation", "MB", "ms", "GB/s", "of copy", "eager / ours", "compiled / ours", "liger / ours", title=title)
    for r in results:
        others = ("" if other is None else f"{other / r.ours:.2f}" for other in (r.eager, r.compiled, r.liger))
        rate = f"{r.bytes / r.ours / 1e9:.1f}"
        shown.add_row(r.name, f"{r.bytes / 1e6:.0f}", f"{r.ours * 1e3:.2f}", rate, f"{r.of_copy:.2f}", *others)
    return shown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=default_elements(), help="elements of the tensors")
    parser.add_argument("--repeat", type=int, default=5 if DEVICE.type == "cpu" else 20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of the plain forms")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory(KEPT, KEPT)
    results = []
    for group in GROUPS:
        made = group(options.elements)
        cases = [c for c in (made if isinstance(made, list) else [made]) if options.only in c.name]
        results += [measure(case, options.repeat, options.compile) for case in cases]
    Console(width=125).print(table(results))
    if options.json:
        options.json.write_text(json.dumps([{**asdict(r), "of_copy": r.of_copy} for r in results], indent=1))


if __name__ == "__main__":
    main()
