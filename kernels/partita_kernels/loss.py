"""Cross entropy of logits with label smoothing, z-loss and ignored labels, forward and backward without a copy of the logits.

For a row x with label y over V classes, Z = log sum exp x, a = label_smoothing: loss = Z - (1 - a) x_y - a avg(x) + z_loss Z^2. Its gradient is
(1 + 2 z_loss Z) softmax(x) - a / V - (1 - a) [j = y].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from partita_kernels import native
from partita_kernels.dispatch import Operation
from partita_kernels.jit import kernel, power_of_2
from partita_kernels.rows import as_rows, like, wide

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor

BLOCK = 4096  # classes at a time of a Triton program
CHUNK = 1 << 22  # logits at a time in plain torch


class Options(NamedTuple):
    """What belongs to the loss and not to a batch. classes: of all shards, where logits are one; 0: as many as they have columns."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    classes: int = 0


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(float32 sum of losses, int64 count of labels that aren't ignored), 0-d, of logits [..., V] and int64 labels [...].

    A label outside of 0..V-1 makes the loss NaN. Without counted labels the sum is 0, and so are its gradients.
    """
    losses, _ = torch.ops.partita.cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss)
    return losses.sum(), (labels != ignore_index).sum()


# ---- plain torch


def reference(logits: Tensor, labels: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """logits [R, V], labels [R] -> losses [R] (0 where ignored), log-sum-exp [R]; float32, or float64 for float64 logits."""
    rows = max(1, CHUNK // max(1, logits.shape[1]))
    pieces = [_piece(wide(x), y, o) for x, y in zip(logits.split(rows), labels.split(rows), strict=True)]
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])


def _piece(x: Tensor, y: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    known = (y >= 0) & (y < x.shape[1])
    lse = x.logsumexp(1)
    picked = x.gather(1, y.where(known, 0)[:, None])[:, 0]
    losses = lse - (1 - o.label_smoothing) * picked + o.z_loss * lse.square()
    if o.label_smoothing:
        losses = losses - o.label_smoothing * x.mean(1)
    losses = losses.masked_fill(~known, float("nan"))
    return losses.masked_fill(y == o.ignore_index, 0.0), lse


def reference_backward(dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, o: Options, out: Tensor) -> None:
    """Gradient of the logits into `out` [R, V], which may be the logits themselves."""
    rows = max(1, CHUNK // max(1, logits.shape[1]))
    for d, x, y, z, to in zip(*(t.split(rows) for t in (dlosses, logits, labels, lse, out)), strict=True):
        kept = y != o.ignore_index
        g = (wide(x) - z[:, None]).exp_().mul_((1 + 2 * o.z_loss * z)[:, None])
        if o.label_smoothing:
            g.sub_(o.label_smoothing / (o.classes or x.shape[1]))
        known = (y >= 0) & (y < x.shape[1])
        g.scatter_add_(1, y.where(known, 0)[:, None], (known.to(g.dtype) * (o.label_smoothing - 1))[:, None])
        to.copy_((g * d[:, None]).masked_fill_(~kept[:, None], 0.0))


# ---- Triton


@kernel
def _forward(
    x_ptr, y_ptr, loss_ptr, lse_ptr, n, stride, ignore, smoothing, z_loss, SMOOTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row for each program: lanes keep their own maximum and sum, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(y_ptr + row)
    x_ptr += row * stride
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + c, mask=c < n, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, x)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.exp(x - safe)
        peak = higher
        if SMOOTH:
            plain += tl.where(c < n, x, 0.0)
    top = tl.max(peak, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    known = (label >= 0) & (label < n)
    picked = tl.load(x_ptr + label, mask=known, other=0.0).to(tl.float32)
    loss = lse - (1.0 - smoothing) * picked + z_loss * lse * lse
    if SMOOTH:
        loss = loss - smoothing * tl.sum(plain, 0) / n
    loss = tl.where(known, loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(label == ignore, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@kernel
def _backward(
    d_ptr, x_ptr, y_ptr, lse_ptr, out_ptr, n, stride, out_stride, d_stride, ignore, smoothing, z_loss, shift, BLOCK: tl.constexpr
):  # fmt: skip
    """A piece of a row for each program; a row that is ignored gets zeros, whatever its logits are."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < n
    label = tl.load(y_ptr + row)
    d = tl.load(d_ptr + row * d_stride)
    lse = tl.load(lse_ptr + row)
    x = tl.load(x_ptr + row * stride + c, mask=inside, other=-float("inf")).to(tl.float32)
    g = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - shift
    g = tl.where(c == label, g - (1.0 - smoothing), g) * d
    g = tl.where(label == ignore, 0.0, g)
    tl.store(out_ptr + row * out_stride + c, g.to(out_ptr.dtype.element_ty), mask=inside)


def triton(logits: Tensor, labels: Tensor, o: Options, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    rows, n = logits.shape
    if logits.dtype == torch.float64 or logits.numel() == 0:
        return reference(logits, labels, o)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse, block = torch.empty_like(losses), min(block, power_of_2(n))
    _forward[(rows,)](
        logits, labels, losses, lse, n, logits.stride(0), *o[:3], SMOOTH=o.label_smoothing != 0, BLOCK=block, num_warps=_warps(block)
    )  # fmt: skip
    return losses, lse


def triton_backward(
    dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, o: Options, out: Tensor, block: int = BLOCK
) -> None:
    """As `reference_backward`."""
    rows, n = logits.shape
    if logits.dtype == torch.float64 or logits.numel() == 0:
        return reference_backward(dlosses, logits, labels, lse, o, out)
    block = min(block, power_of_2(n))
    _backward[(rows, -(-n // block))](
        dlosses, logits, labels, lse, out, n, logits.stride(0), out.stride(0), dlosses.stride(0), *o[:3], o.label_smoothing / (o.classes or n),
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return None


def _warps(block: int) -> int:
    return min(16, max(4, block // 256))


# ---- CPU


def cpu(logits: Tensor, labels: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    library = native.load("loss") if logits.dtype in native.DTYPES else None
    if library is None:
        return reference(logits, labels, o)
    losses, p = torch.empty(logits.shape[0]), native.pointer
    lse = torch.empty_like(losses)
    sizes = map(native.integer, (*logits.shape, logits.stride(0), o.ignore_index))
    numbers = map(native.single, (o.label_smoothing, o.z_loss))
    library.cross_entropy(
        p(logits), p(labels), p(losses), p(lse), *sizes, *numbers, native.DTYPES[logits.dtype], native.threads()
    )
    return losses, lse


def cpu_backward(dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, o: Options, out: Tensor) -> None:
    """As `reference_backward`."""
    library = native.load("loss") if logits.dtype in native.DTYPES and dlosses.dtype == torch.float32 else None
    if library is None:
        return reference_backward(dlosses, logits, labels, lse, o, out)
    p = native.pointer
    strides = (logits.stride(0), out.stride(0), dlosses.stride(0), o.ignore_index)
    library.cross_entropy_backward(
        p(dlosses), p(logits), p(labels), p(lse), p(out), *map(native.integer, (*logits.shape, *strides)),
        *map(native.single, (o.label_smoothing, o.z_loss, o.label_smoothing / (o.classes or logits.shape[1]))),
        native.DTYPES[logits.dtype], native.threads(),
    )  # fmt: skip
    return None


# ---- one operation

CROSS_ENTROPY = Operation("cross_entropy", reference, triton, cpu)
CROSS_ENTROPY_BACKWARD = Operation("cross_entropy_backward", reference_backward, triton_backward, cpu_backward)

_OPTIONS = "int ignore_index, float label_smoothing, float z_loss"


@torch.library.custom_op(
    "partita::cross_entropy", mutates_args=(), schema=f"(Tensor logits, Tensor labels, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    flat = labels.reshape(-1).contiguous()
    return CROSS_ENTROPY.on(logits.device)(as_rows(logits), flat, Options(ignore_index, label_smoothing, z_loss))


@torch.library.custom_op(
    "partita::cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor dlosses, Tensor logits, Tensor labels, Tensor lse, {_OPTIONS}) -> Tensor",
)
def _cross_entropy_backward(
    dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    rows, flat, out = as_rows(logits), labels.reshape(-1).contiguous(), like(logits)
    options = Options(ignore_index, label_smoothing, z_loss)
    CROSS_ENTROPY_BACKWARD.on(logits.device)(dlosses, rows, flat, lse, options, out.view(rows.shape))
    return out


@_cross_entropy.register_fake
def _cross_entropy_fake(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(labels.numel(), dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    return losses, torch.empty_like(losses)


@_cross_entropy_backward.register_fake
def _cross_entropy_backward_fake(
    dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    return like(logits)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, labels, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, labels, output[1])


def _differentiate(ctx, dlosses, _lse):  # type: ignore[no-untyped-def]
    return torch.ops.partita.cross_entropy_backward(dlosses, *ctx.saved_tensors, *ctx.options), None, None, None, None


_cross_entropy.register_autograd(_differentiate, setup_context=_save)
