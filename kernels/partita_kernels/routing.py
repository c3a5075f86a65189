"""Which experts a token is sent to, and with which gates: scores, choice of the best k, gates, in one pass over the logits; backward in another.

Scores s of E experts from logits x: softmax (x) or sigmoid (x). The k experts with the largest s + bias are chosen, of equal ones the first; with
groups only among the best groups, which count by the sum of their two largest (DeepSeek-V3, section 2.1.2). Gates come from s without the bias
(Wang et al. 2024), times `scale`:

softmax_all      s of the chosen (Fedus et al. 2022)
softmax_chosen   s of the chosen over their sum (GShard: Lepikhin et al. 2021; Mixtral)
sigmoid          the same with sigmoid (x) (DeepSeek-V3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import cdiv, kernel, power_of_2
from partita_kernels.rows import wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor
Routed = tuple[Tensor, Tensor, Tensor]

GATES = {"softmax_all": 0, "softmax_chosen": 1, "sigmoid": 2}
SIGMOID = GATES["sigmoid"]
TILE = 1024  # scores that a Triton program holds
SMALL = 1e-20  # keeps a sum of scores that are all zero out of the denominator
MOST_EXPERTS = 4096  # that a Triton program holds for one token


class Choosing(NamedTuple):
    """k: experts for a token. gate: a value of GATES. groups, kept: into how many groups experts are split, and how many are left."""

    k: int
    gate: int
    groups: int = 1
    kept: int = 1
    scale: float = 1.0


def route(
    logits: Tensor,
    k: int,
    gate: str = "softmax_chosen",
    *,
    bias: Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
) -> Routed:
    """logits [T, E], float32 bias [E] -> experts int64 [T, k] best first, gates [T, k], probabilities [T, E].

    Gates and probabilities are float32 (float64 for float64 logits) and differentiable; probabilities are the scores, for sigmoid over their sum.
    The bias has no gradient. Raises ValueError where k, groups or gate don't fit.
    """
    experts = logits.shape[-1]
    if gate not in GATES:
        raise ValueError(f"gate={gate!r}: there are {', '.join(GATES)}")
    if groups < 1 or experts % groups or not 1 <= kept_groups <= groups:
        raise ValueError(f"{experts} experts can't be split into {groups} groups of which {kept_groups} are kept")
    if not 1 <= k <= kept_groups * (experts // groups):
        raise ValueError(f"k={k}: there are {kept_groups * (experts // groups)} experts to choose from")
    return torch.ops.partita.route(logits, bias, k, GATES[gate], groups, kept_groups, scale)


# ---- plain torch


def reference(logits: Tensor, bias: Tensor | None, o: Choosing) -> Routed:
    """As `route`."""
    x = wide(logits)
    if o.gate == SIGMOID:
        scores = x.sigmoid()
        probabilities = scores / (scores.sum(1, keepdim=True) + SMALL)
    else:
        scores = probabilities = x.softmax(1)
    wanted = scores if bias is None else scores + bias
    if o.groups > 1:
        split = wanted.view(len(wanted), o.groups, -1)
        strength = split.topk(min(2, split.shape[2]), dim=2).values.sum(2)
        best = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, strength.topk(o.kept, dim=1).indices, True)
        wanted = split.masked_fill(~best[:, :, None], -torch.inf).reshape(wanted.shape)
    # Stable, so that of equal ones the first is chosen.
    experts = wanted.argsort(dim=1, descending=True, stable=True)[:, : o.k].contiguous()
    gates = scores.gather(1, experts)
    if o.gate != GATES["softmax_all"]:
        gates = gates / (gates.sum(1, keepdim=True) + SMALL)
    return experts, gates * o.scale, probabilities


def reference_backward(
    dgates: Tensor, dprobabilities: Tensor, logits: Tensor, probabilities: Tensor, experts: Tensor, o: Choosing
) -> Tensor:
    """Gradient of the logits [T, E], in their dtype."""
    scores = wide(logits).sigmoid() if o.gate == SIGMOID else probabilities
    dchosen = dgates * o.scale
    if o.gate != GATES["softmax_all"]:
        chosen = scores.gather(1, experts)
        total = chosen.sum(1, keepdim=True) + SMALL
        dchosen = (dchosen - (dchosen * chosen).sum(1, keepdim=True) / total) / total
    if o.gate == SIGMOID:
        along = (dprobabilities * probabilities).sum(1, keepdim=True)
        d = ((dprobabilities - along) / (scores.sum(1, keepdim=True) + SMALL)).scatter_add(1, experts, dchosen)
        return (d * scores * (1 - scores)).to(logits.dtype)
    d = dprobabilities.scatter_add(1, experts, dchosen)
    return (scores * (d - (d * scores).sum(1, keepdim=True))).to(logits.dtype)


# ---- Triton


@kernel
def _forward(
    x_ptr, bias_ptr, experts_ptr, gates_ptr, p_ptr, tokens, experts, members, k, kept, scale, x_stride, CHOICES: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens for each program, their experts as [ROWS, groups, members]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)[None, :, None]
    member = tl.arange(0, MEMBERS)[None, None, :]
    e = group * members + member
    known = (member < members) & (e < experts)
    r3 = row[:, None, None]
    inside = known & (r3 < tokens)
    x = tl.load(x_ptr + r3 * x_stride + e, mask=inside, other=-float("inf")).to(tl.float32)
    if GATE == 2:
        s = tl.where(known, tl.sigmoid(x), 0.0)
        p = s / (tl.sum(tl.sum(s, 2), 1)[:, None, None] + 1e-20)
    else:
        top = tl.max(tl.max(x, 2), 1)[:, None, None]
        s = tl.exp(x - tl.where(top == -float("inf"), 0.0, top))
        s = s / tl.sum(tl.sum(s, 2), 1)[:, None, None]
        p = s
    tl.store(p_ptr + r3 * experts + e, p, mask=inside)
    wanted = s
    if BIAS:
        wanted = s + tl.load(bias_ptr + e, mask=known, other=0.0)
    wanted = tl.where(wanted == wanted, wanted, float("inf"))  # NaN is above all, as in torch
    free = inside
    if GROUPED:
        first = tl.max(tl.where(free, wanted, -float("inf")), 2)
        where = tl.min(tl.where(free & (wanted == first[:, :, None]), member, MEMBERS), 2)
        second = tl.max(tl.where(free & (member != where[:, :, None]), wanted, -float("inf")), 2)
        strength = first + tl.where(second == -float("inf"), 0.0, second)
        g2 = tl.arange(0, GROUPS)[None, :]
        open_ = (g2 * members < experts) & (row[:, None] < tokens)
        left = open_ & (g2 < 0)
        for _ in range(kept):
            best = tl.max(tl.where(open_, strength, -float("inf")), 1)
            at = tl.min(tl.where(open_ & (strength == best[:, None]), g2, GROUPS), 1)
            left = left | (g2 == at[:, None])
            open_ = open_ & (g2 != at[:, None])
        free = free & left[:, :, None]
    choice = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros([ROWS, CHOICES], tl.int64)
    gates = tl.zeros([ROWS, CHOICES], tl.float32)
    for j in range(k):
        best = tl.max(tl.max(tl.where(free, wanted, -float("inf")), 2), 1)[:, None, None]
        at = tl.min(tl.min(tl.where(free & (wanted == best), e, experts), 2), 1)
        here = e == at[:, None, None]
        gate = tl.sum(tl.sum(tl.where(here, s, 0.0), 2), 1)
        chosen = tl.where(choice == j, at[:, None].to(tl.int64), chosen)
        gates = tl.where(choice == j, gate[:, None], gates)
        free = free & (e != at[:, None, None])
    if GATE != 0:
        gates = gates / (tl.sum(gates, 1)[:, None] + 1e-20)
    live = (row < tokens)[:, None] & (choice < k)
    tl.store(experts_ptr + row[:, None] * k + choice, chosen, mask=live)
    tl.store(gates_ptr + row[:, None] * k + choice, gates * scale, mask=live)


@kernel
def _backward(
    dg_ptr, dp_ptr, x_ptr, p_ptr, experts_ptr, dx_ptr, tokens, experts, k, scale, dg_row, dg_col, dp_row, dp_col, x_stride,
    GATE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens for each program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < tokens
    e = tl.arange(0, EXPERTS)[None, :]
    r2 = row[:, None]
    inside = live[:, None] & (e < experts)
    p = tl.load(p_ptr + r2 * experts + e, mask=inside, other=0.0)
    d = tl.load(dp_ptr + r2 * dp_row + e * dp_col, mask=inside, other=0.0)
    s = p
    if GATE == 2:
        x = tl.load(x_ptr + r2 * x_stride + e, mask=inside, other=0.0).to(tl.float32)
        s = tl.where(inside, tl.sigmoid(x), 0.0)
        d = (d - tl.sum(d * p, 1)[:, None]) / (tl.sum(s, 1)[:, None] + 1e-20)
    total = tl.zeros([ROWS], tl.float32) + 1e-20
    along = tl.zeros([ROWS], tl.float32)
    if GATE != 0:
        for j in range(k):
            at = tl.load(experts_ptr + row * k + j, mask=live, other=0)
            score = tl.sum(tl.where(e == at[:, None], s, 0.0), 1)
            total += score
            along += score * tl.load(dg_ptr + row * dg_row + j * dg_col, mask=live, other=0.0)
        along = along / total
    for j in range(k):
        at = tl.load(experts_ptr + row * k + j, mask=live, other=0)
        dg = tl.load(dg_ptr + row * dg_row + j * dg_col, mask=live, other=0.0)
        if GATE != 0:
            dg = (dg - along) / total
        d += tl.where(e == at[:, None], (dg * scale)[:, None], 0.0)
    if GATE == 2:
        dx = d * s * (1.0 - s)
    else:
        dx = s * (d - tl.sum(d * s, 1)[:, None])
    tl.store(dx_ptr + r2 * experts + e, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def triton(logits: Tensor, bias: Tensor | None, o: Choosing, tile: int = TILE) -> Routed:
    """As `reference`."""
    tokens, count = logits.shape
    members = count // o.groups
    groups, width = power_of_2(o.groups), power_of_2(members)
    if logits.dtype == torch.float64 or groups * width > MOST_EXPERTS:
        return reference(logits, bias, o)
    experts, gates, probabilities = _outputs(logits, o.k)
    if tokens:
        rows = min(max(1, tile // (groups * width)), power_of_2(tokens))
        _forward[(cdiv(tokens, rows),)](
            logits, probabilities if bias is None else bias, experts, gates, probabilities, tokens, count, members, o.k, o.kept, o.scale,
            logits.stride(0), CHOICES=power_of_2(o.k), GATE=o.gate, BIAS=bias is not None, GROUPED=o.groups > 1, ROWS=rows, GROUPS=groups, MEMBERS=width,
        )  # fmt: skip
    return experts, gates, probabilities


def triton_backward(
    dgates: Tensor, dprobabilities: Tensor, logits: Tensor, probabilities: Tensor, experts: Tensor, o: Choosing, tile: int = TILE
) -> Tensor:
    """As `reference_backward`."""
    tokens, count = logits.shape
    width = power_of_2(count)
    if logits.dtype == torch.float64 or width > MOST_EXPERTS:
        return reference_backward(dgates, dprobabilities, logits, probabilities, experts, o)
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if tokens:
        rows = min(max(1, tile // width), power_of_2(tokens))
        _backward[(cdiv(tokens, rows),)](
            dgates, dprobabilities, logits, probabilities, experts, dx, tokens, count, o.k, o.scale, *dgates.stride(),
            *dprobabilities.stride(), logits.stride(0), GATE=o.gate, ROWS=rows, EXPERTS=width,
        )  # fmt: skip
    return dx


# ---- CPU


def cpu(logits: Tensor, bias: Tensor | None, o: Choosing) -> Routed:
    """As `reference`."""
    library = native.load("moe") if logits.dtype in native.DTYPES else None
    if library is None:
        return reference(logits, bias, o)
    (experts, gates, probabilities), p = _outputs(logits, o.k), native.pointer
    sizes = map(native.integer, (*logits.shape, logits.stride(0), o.k, o.groups, o.kept))
    library.route(
        p(logits), p(bias), p(experts), p(gates), p(probabilities), *sizes, native.single(o.scale), o.gate, native.DTYPES[logits.dtype],
        native.threads(),
    )  # fmt: skip
    return experts, gates, probabilities


def cpu_backward(
    dgates: Tensor, dprobabilities: Tensor, logits: Tensor, probabilities: Tensor, experts: Tensor, o: Choosing
) -> Tensor:
    """As `reference_backward`."""
    library = native.load("moe") if logits.dtype in native.DTYPES else None
    if library is None:
        return reference_backward(dgates, dprobabilities, logits, probabilities, experts, o)
    dx, p = torch.empty(logits.shape, dtype=logits.dtype), native.pointer
    dgates, dprobabilities = dgates.contiguous(), dprobabilities.contiguous()
    sizes = map(native.integer, (*logits.shape, logits.stride(0), o.k))
    library.route_backward(
        p(dgates), p(dprobabilities), p(logits), p(probabilities), p(experts), p(dx), *sizes, native.single(o.scale), o.gate,
        native.DTYPES[logits.dtype], native.threads(),
    )  # fmt: skip
    return dx


def _outputs(logits: Tensor, k: int) -> Routed:
    """Unwritten."""
    tokens, count = logits.shape
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    gates = torch.empty(tokens, k, dtype=dtype, device=logits.device)
    return torch.empty(tokens, k, dtype=torch.int64, device=logits.device), gates, gates.new_empty(tokens, count)


# ---- one operation

ROUTE = Operation("route", reference, triton, cpu)
ROUTE_BACKWARD = Operation("route_backward", reference_backward, triton_backward, cpu_backward)

_CHOOSING = "int k, int gate, int groups, int kept, float scale"


@torch.library.custom_op(
    "partita::route", mutates_args=(), schema=f"(Tensor logits, Tensor? bias, {_CHOOSING}) -> (Tensor, Tensor, Tensor)"
)
def _route(logits: Tensor, bias: Tensor | None, k: int, gate: int, groups: int, kept: int, scale: float) -> Routed:
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    bias = None if bias is None else wide(bias).contiguous()
    return ROUTE.on(x.device)(x, bias, Choosing(k, gate, groups, kept, scale))


@torch.library.custom_op(
    "partita::route_backward",
    mutates_args=(),
    schema=f"(Tensor dgates, Tensor dprobabilities, Tensor logits, Tensor probabilities, Tensor experts, {_CHOOSING}) -> Tensor",
)
def _route_backward(
    dgates: Tensor, dprobabilities: Tensor, logits: Tensor, probabilities: Tensor, experts: Tensor, k: int, gate: int, groups: int, kept: int,
    scale: float,
) -> Tensor:  # fmt: skip
    x, choosing = logits if logits.stride(1) == 1 else logits.contiguous(), Choosing(k, gate, groups, kept, scale)
    return ROUTE_BACKWARD.on(x.device)(dgates, dprobabilities, x, probabilities, experts, choosing)


@_route.register_fake
def _route_fake(logits: Tensor, bias: Tensor | None, k: int, gate: int, groups: int, kept: int, scale: float) -> Routed:
    return _outputs(logits, k)


@_route_backward.register_fake
def _route_backward_fake(
    dgates: Tensor, dprobabilities: Tensor, logits: Tensor, probabilities: Tensor, experts: Tensor, k: int, gate: int, groups: int, kept: int,
    scale: float,
) -> Tensor:  # fmt: skip
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, _, *ctx.choosing = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, output[2], output[0])


def _differentiate(ctx, _experts, dgates, dprobabilities):  # type: ignore[no-untyped-def]
    return torch.ops.partita.route_backward(dgates, dprobabilities, *ctx.saved_tensors, *ctx.choosing), *[None] * 6


_route.register_autograd(_differentiate, setup_context=_save)
