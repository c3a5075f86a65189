"""Layers made of several kernels: a mixture of experts, linear with cross entropy (time and peak memory), whole steps with kernels on and off.

python scripts/bench/layers.py [moe] [loss] [step] [--threads T] [--repeat R] [--dtype float32] [--json FILE]

Everything is forward and backward. Each row is the median of turns taken one after the other, so that a busy machine slows all alike; results are
compared before they are timed. Peak memory is measured in processes of their own on a CPU (the system's count of pages), by torch on an accelerator.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import partita_kernels as kernels

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
CPU = DEVICE.type == "cpu"
Run = Callable[[], Any]
Row = dict[str, Any]


def interleaved(runs: dict[str, Run], repeat: int) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize() -> None:
    if not CPU:
        torch.accelerator.synchronize()


# ---- mixture of experts


def moe_rows(dtype: torch.dtype, repeat: int) -> list[Row]:
    """Experts of SwiGLU form, 2 for each token. Logits are float32: in bfloat16 some are equal, and who is chosen of equal ones is open."""
    shapes = (
        [(512, 256, 256, 64), (2048, 512, 512, 64), (2048, 512, 1024, 8)]
        if CPU
        else [(16384, 2048, 1024, 64), (16384, 4096, 14336, 8)]
    )
    return [_moe_row(*shape, dtype, repeat) for shape in shapes]


def _moe_row(tokens: int, width: int, inner: int, experts: int, dtype: torch.dtype, repeat: int) -> Row:
    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=DEVICE) / shape[-2] ** 0.5).to(dtype).requires_grad_()

    x = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
    router, up, down = leaf(width, experts), leaf(experts, width, 2 * inner), leaf(experts, inner, width)
    leaves, dy = [x, router, up, down], torch.randn(tokens, width, device=DEVICE).to(dtype)

    def ours() -> torch.Tensor:
        chosen, gates, _ = kernels.route(x.float() @ router.float(), 2)
        order = kernels.expert_order(chosen, experts)
        gate, value = kernels.grouped_matmul(kernels.permute(x, order), up, order.sizes).chunk(2, 1)
        return kernels.unpermute(kernels.grouped_matmul(kernels.swiglu(gate, value), down, order.sizes), order, gates)

    def loop() -> torch.Tensor:
        """What one writes first: a mask and an index_add for each expert. Weights are unbound once, which is the kind way."""
        gates, chosen = (x.float() @ router.float()).softmax(-1).topk(2)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, (a, b) in enumerate(zip(up.unbind(), down.unbind(), strict=True)):
            token, place = torch.where(chosen == e)
            gate, value = (x[token] @ a).chunk(2, 1)
            out = out.index_add(0, token, ((F.silu(gate) * value) @ b) * gates[token, place, None].to(dtype))
        return out

    runs = {"ours": ours, "loop": loop}
    block = _mixtral(width, inner, experts, leaves)
    if block is not None:
        runs["mixtral"] = block
    error = (ours().float() - loop().float()).norm() / loop().float().norm()
    assert error < (1e-5 if dtype == torch.float32 else 3e-2), f"mixture of experts differs by {error:.1e}"

    def trained(run: Run) -> Run:
        return lambda: torch.autograd.grad(run(), leaves, dy)

    seconds = interleaved({name: trained(run) for name, run in runs.items()}, repeat)
    return {"what": f"MoE: {tokens} tokens, {width} wide, {experts} experts of {inner}", **seconds}


def _mixtral(width: int, inner: int, experts: int, leaves: list[torch.Tensor]) -> Run | None:
    """transformers' block with the same weights."""
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return None
    config = MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=2)
    with torch.device("meta"):
        block = MixtralSparseMoeBlock(config)
    x, router, up, down = leaves
    # A block's weights are those of nn.Linear; gradients go through the transposes, which are views.
    names = {"gate.weight": router.t(), "experts.gate_up_proj": up.transpose(1, 2), "experts.down_proj": down.transpose(1, 2)}
    return lambda: torch.func.functional_call(block, names, (x[None],))[0]


# ---- linear and cross entropy

LOSSES = [(1024, 2048, 256), (4096, 8192, 256), (1024, 50304, 768), (4096, 50304, 768)]  # rows, classes, width
LOSSES_ACCELERATOR = [(16384, 2048, 1024), (16384, 50304, 2048), (16384, 128256, 4096)]


def _loss_inputs(rows: int, classes: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Made in place: nothing larger may have been there before the peak is taken."""
    x, w = (torch.empty(n, width, dtype=dtype, device=DEVICE).normal_() for n in (rows, classes))
    return x.requires_grad_(), w.div_(width**0.5).requires_grad_(), torch.randint(classes, (rows,), device=DEVICE)


def _fused(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return kernels.linear_cross_entropy(x, w, y)[0]


def _plain(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w), y, reduction="sum")


def loss_rows(dtype: torch.dtype, repeat: int) -> list[Row]:
    """Time, and bytes of memory at the peak above what was there before: gradients included, and without them."""
    return [_loss_row(shape, dtype, repeat) for shape in (LOSSES if CPU else LOSSES_ACCELERATOR)]


def _loss_row(shape: tuple[int, int, int], dtype: torch.dtype, repeat: int) -> Row:
    x, w, y = _loss_inputs(*shape, dtype)
    runs: dict[str, Run] = {
        "ours": lambda: torch.autograd.grad(_fused(x, w, y), [x, w]),
        "eager": lambda: torch.autograd.grad(_plain(x, w, y), [x, w]),
    }
    for ours, plain in zip(runs["ours"](), runs["eager"](), strict=True):
        error = (ours.float() - plain.float()).norm() / plain.float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2), f"gradients differ by {error:.1e}"
    seconds = interleaved(runs, repeat)
    peaks = {name: _peak(name, shape, dtype) for name in runs}
    gradients = (x.numel() + w.numel()) * x.element_size()
    found = {f"{n} peak": p for n, p in peaks.items()} | {
        f"{n} peak beside gradients": max(0, p - gradients) for n, p in peaks.items()
    }
    return {"what": "linear + cross entropy: {} rows, {} classes, {} wide".format(*shape), **seconds, **found}


def _peak(which: str, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes above those before a forward and backward."""
    name = str(dtype).removeprefix("torch.")
    command = [
        sys.executable,
        __file__,
        "--peak",
        which,
        *map(str, shape),
        "--dtype",
        name,
        "--threads",
        str(torch.get_num_threads()),
    ]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(which: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Body of `_peak`'s process."""
    run = _fused if which == "ours" else _plain
    small = _loss_inputs(8, 16, shape[2], dtype)  # compile, load, start threads
    torch.autograd.grad(run(*small), small[:2])
    x, w, y = _loss_inputs(*shape, dtype)
    if not CPU:
        torch.accelerator.reset_peak_memory_stats()
    before = _memory()
    torch.autograd.grad(run(x, w, y), [x, w])
    print(max(0, _memory() - before))


def _memory() -> int:
    """The peak so far. On a CPU the inputs were the peak before: larger ones than these haven't been there."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if CPU else torch.accelerator.max_memory_allocated()


# ---- whole steps


def step_rows(dtype: torch.dtype, repeat: int) -> list[Row]:
    """GPT and Llama of 4 layers: one update with AdamW; also by how much 5 losses of plain descent differ with kernels on and off."""
    return [_step_row(name, dtype, repeat) for name in ("gpt", "llama")]


def _step_row(name: str, dtype: torch.dtype, repeat: int) -> Row:
    from partita.models import layers
    from partita.train.loss import token_cross_entropy

    width, heads, vocab, batch, sequence = (256, 8, 2048, 8, 128) if CPU else (2048, 16, 50304, 8, 2048)
    model = _model(name, width, heads, vocab, sequence).to(DEVICE, dtype)
    ids = torch.randint(vocab, (batch, sequence + 1), device=DEVICE)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(when: str, optimizer: torch.optim.Optimizer) -> float:
        layers.choose(when)
        total, count = token_cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        return float(total / count)

    losses = {}
    for when in ("never", "always"):
        model.load_state_dict(start, strict=False)  # tied weights have one name here
        descent = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[when] = [update(when, descent) for _ in range(5)]
    apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    seconds = interleaved({"ours": lambda: update("always", adam), "eager": lambda: update("never", adam)}, repeat)
    return {"what": f"{name} step, {width} wide, {batch} x {sequence} tokens", **seconds, "losses apart": apart}


def _model(name: str, width: int, heads: int, vocab: int, sequence: int) -> torch.nn.Module:
    from types import SimpleNamespace

    from partita.config.schema import DataConfig, ModelConfig
    from partita.models.gpt import make_gpt
    from partita.models.init import initialize
    from partita.models.llama import make_llama

    node = ModelConfig(name=name, layers=4, width=width, heads=heads)
    config: Any = SimpleNamespace(model=node, data=DataConfig(sequence=sequence), seed=3)
    make = make_gpt if name == "gpt" else make_llama
    with torch.device("meta"):
        model = make(config, vocab)
    trained: torch.nn.Module = initialize(model, 3).train()
    return trained


# ---- what is printed

PARTS = {"moe": moe_rows, "loss": loss_rows, "step": step_rows}


def table(rows: list[Row], dtype: torch.dtype) -> Table:
    """Seconds as ms, others over ours as a factor."""
    shown = Table(
        "what",
        "ours ms",
        "others, over ours",
        "peak MB: ours, eager (beside gradients)",
        "apart",
        title=f"layers on {DEVICE.type}, {dtype}",
    )
    for r in rows:
        others = ", ".join(f"{n} {r[n] / r['ours']:.2f}" for n in ("loop", "mixtral", "eager") if n in r)
        peak = ""
        if "ours peak" in r:
            mb = [r[f"{n} peak{end}"] / 1e6 for end in ("", " beside gradients") for n in ("ours", "eager")]
            peak = f"{mb[0]:.0f}, {mb[1]:.0f} ({mb[2]:.0f}, {mb[3]:.0f})"
        apart = f"{r['losses apart']:.1e}" if "losses apart" in r else ""
        shown.add_row(r["what"], f"{r['ours'] * 1e3:.1f}", others, peak, apart)
    return shown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without any")
    parser.add_argument("--repeat", type=int, default=5 if CPU else 20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--dtype", default="float32" if CPU else "bfloat16")
    parser.add_argument("--json", type=Path, help="write the results there too")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    if options.peak:
        which, *shape = options.parts
        print_peak(which, tuple(map(int, shape)), dtype)  # type: ignore[arg-type]
        return
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    rows = [row for name in options.parts or PARTS for row in PARTS[name](dtype, options.repeat)]
    Console(width=140).print(table(rows, dtype))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
