"""Kernels that multiply matrices against what bounds them: attention against torch's SDPA, products of groups against one dense product.

python scripts/bench/products.py [attention] [groups] [--dtype bfloat16] [--repeat R] [--threads T] [--tune] [--json FILE]

of bound: for attention the time of the fastest SDPA backend that takes the inputs (with a mask for windows and documents) over ours, forward and with
backward; for groups the time of one dense product with as many operations over ours, in each of the three products. Results are compared before they are
timed, and turns are taken one after the other. --tune: with tiles measured on this device, which are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))

from layers import CPU, DEVICE, Row, Run, interleaved

import partita_kernels as kernels
from partita_kernels import tuning

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def apart(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises AssertionError where two ways differ by more than rounding."""
    error = ((got.float() - want.float()).norm() / want.float().norm()).item()
    assert error < (1e-4 if dtype == torch.float32 else 2e-2), f"results differ by {error:.1e}"


# ---- attention


def attention_rows(dtype: torch.dtype, repeat: int) -> list[Row]:
    """Causal, with shared heads, with a sliding window, packed documents; heads of 64 and 128."""
    tokens = 1024 if CPU else 8192
    cases: list[tuple[str, int, int, int, dict[str, Any]]] = [
        ("causal", 16, 16, 128, {}),
        ("causal, heads of 64", 32, 32, 64, {}),
        ("causal, 4 queries a key", 16, 4, 128, {}),
        ("window of an eighth", 16, 16, 128, {"window": tokens // 8}),
        ("eight documents", 16, 16, 128, {"documents": [i * tokens // 8 for i in range(9)]}),
    ]
    return [row for case in cases for row in _attention(*case, tokens, dtype, repeat)]


def _attention(
    name: str, heads: int, groups: int, size: int, limits: dict[str, Any], tokens: int, dtype: torch.dtype, repeat: int
) -> list[Row]:
    q, k, v = (randn(1, tokens, h, size, dtype=dtype).transpose(1, 2).detach().requires_grad_() for h in (heads, groups, groups))
    dout, at = randn(1, heads, tokens, size, dtype=dtype), torch.arange(tokens, device=DEVICE)
    more: dict[str, Any] = {key: torch.tensor(x, device=DEVICE) if key == "documents" else x for key, x in limits.items()}
    low, high = kernels.visible(at, at, **more)
    mask = (at >= low[0, :, None]) & (at < high[0, :, None]) if limits else None

    def ours() -> torch.Tensor:
        return kernels.attention(q, k, v, low, high)[0]

    def theirs(backend: SDPBackend) -> Run:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=heads != groups)

        return run

    runs: dict[str, Run] = {"ours": ours}
    want = ours()
    for label, backend in BACKENDS.items():
        if label == "math" and len(runs) > 1:
            continue  # it would hold all scores
        try:
            apart(theirs(backend)(), want, dtype)
            runs[label] = theirs(backend)
        except RuntimeError:
            continue  # not for such inputs or such a device
    pairs = int((high - low).sum()) * heads
    rows = []
    for label, flops, wrap in (
        ("forward", 4, lambda r: r),
        ("both", 14, lambda r: lambda: torch.autograd.grad(r(), [q, k, v], dout)),
    ):
        seconds = interleaved({n: wrap(r) for n, r in runs.items()}, repeat)
        best = min((s, n) for n, s in seconds.items() if n != "ours")
        rows.append(_row(f"attention, {name}: {label}", flops * pairs * size, seconds["ours"], *best))
    return rows


# ---- groups


def group_rows(dtype: torch.dtype, repeat: int) -> list[Row]:
    """Groups of uneven sizes, one of them empty."""
    shapes = [(2048, 512, 512, 8), (2048, 256, 256, 64)] if CPU else [(32768, 4096, 4096, 8), (32768, 2048, 1024, 64)]
    return [row for shape in shapes for row in _groups(*shape, dtype, repeat)]


def _groups(rows: int, depth: int, width: int, groups: int, dtype: torch.dtype, repeat: int) -> list[Row]:
    x, dy = (randn(rows, n, dtype=dtype) for n in (depth, width))
    weight, dense = randn(groups, depth, width, dtype=dtype), randn(depth, width, dtype=dtype)
    shares = torch.rand(groups) + 0.5
    shares[groups // 2] = 0
    sizes = (shares / shares.sum() * rows).long()
    sizes[0] += rows - sizes.sum()
    sizes = sizes.to(DEVICE)
    from partita_kernels.grouped import GROUPED_OUTER

    outer = GROUPED_OUTER.on(x.device)
    end = int(sizes[0])
    apart(kernels.grouped_matmul(x, weight, sizes)[:end], x[:end] @ weight[0], dtype)
    pairs: dict[str, tuple[Run, Run]] = {
        "forward": (lambda: kernels.grouped_matmul(x, weight, sizes), lambda: x @ dense),
        "of rows": (lambda: kernels.grouped_matmul(dy, weight.transpose(1, 2), sizes), lambda: dy @ dense.t()),
        "of weights": (lambda: outer(x, dy, sizes, False), lambda: x.t() @ dy),
    }
    out = []
    for label, (ours, theirs) in pairs.items():
        seconds = interleaved({"ours": ours, "dense": theirs}, repeat)
        name = f"{groups} groups of {rows // groups} x {depth} x {width}: {label}"
        out.append(_row(name, 2 * rows * depth * width, seconds["ours"], seconds["dense"], "dense"))
    return out


def _row(what: str, flops: int, ours: float, bound: float, by: str) -> Row:
    return {"what": what, "ours": ours, "flops": flops, "bound": bound, "bound by": by, "of bound": bound / ours}


PARTS = {"attention": attention_rows, "groups": group_rows}


def table(rows: list[Row], dtype: torch.dtype) -> Table:
    """For people."""
    shown = Table("operation", "ms", "TFLOP/s", "of bound", "bound by", title=f"products on {DEVICE.type}, {dtype}")
    for r in rows:
        rate = f"{r['flops'] / r['ours'] / 1e12:.2f}"
        shown.add_row(r["what"], f"{r['ours'] * 1e3:.2f}", rate, f"{r['of bound']:.2f}", r["bound by"])
    return shown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all without any")
    parser.add_argument("--dtype", default="float32" if CPU else "bfloat16")
    parser.add_argument("--repeat", type=int, default=5 if CPU else 20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--tune", action="store_true", help="with tiles measured on this device, which are kept")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    torch.set_num_threads(options.threads)
    tuning.choose("tune" if options.tune else "default")
    dtype = getattr(torch, options.dtype)
    rows = [row for name in options.parts or PARTS for row in PARTS[name](dtype, options.repeat)]
    Console(width=120).print(table(rows, dtype))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
