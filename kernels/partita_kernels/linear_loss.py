"""Linear layer and cross entropy together, in chunks of rows: logits of the whole batch never exist.

The gradients are computed with the losses, while a chunk's logits are there: three matrix products as without fusing, none twice. Memory beside
inputs and gradients: one chunk of logits, and for low-precision weights a float32 sum of their gradient.
"""

from __future__ import annotations

import torch

from partita_kernels.dispatch import Operation
from partita_kernels.loss import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, Options
from partita_kernels.rows import as_rows
from partita_kernels.sgd import sgd_

Tensor = torch.Tensor

CHUNK_BYTES = {"cpu": 32 << 20, "accelerator": 512 << 20}  # of a chunk's logits
LEAST_ROWS = 32  # of a chunk: a matrix product needs some


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of logits x @ weight.T without the logits: x [..., C], weight [V, C], int64 labels [...] -> (sum, count)."""
    gradients = torch.is_grad_enabled()
    wanted = (gradients and x.requires_grad, gradients and weight.requires_grad)
    total, _, _ = torch.ops.partita.linear_cross_entropy(x, weight, labels, ignore_index, label_smoothing, z_loss, *wanted)
    return total, (labels != ignore_index).sum()


def chunk_rows(rows: int, classes: int, element: int, device: torch.device) -> int:
    """Rows of a chunk, so that all chunks are about alike."""
    limit = CHUNK_BYTES.get(device.type, CHUNK_BYTES["accelerator"])
    most = max(LEAST_ROWS, limit // max(1, classes * element))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


class _Sums:
    """The gradients that a pass over the chunks fills.

    That of a low-precision weight is summed in float32; its own memory holds each chunk's part before, so that no chunk allocates.
    """

    def __init__(self, x: Tensor, weight: Tensor, want_x: bool, want_weight: bool) -> None:
        self.x = torch.empty_like(x) if want_x else x.new_empty(0)
        self.weight = torch.empty_like(weight) if want_weight else weight.new_empty(0)
        self.wanted = (want_x, want_weight)
        self._total: Tensor | None = None
        if want_weight and not len(x):
            self.weight.zero_()

    def add(self, rows: slice, dlogits: Tensor, x: Tensor, weight: Tensor, last: bool) -> None:
        """Take in a chunk. last: is it the last?"""
        if self.wanted[0]:
            torch.mm(dlogits, weight, out=self.x[rows])
        if not self.wanted[1]:
            return
        first = rows.start == 0
        if not first and self.weight.dtype in (torch.float32, torch.float64):
            self.weight.addmm_(dlogits.t(), x)
            return
        torch.mm(dlogits.t(), x, out=self.weight)
        if self._total is not None:
            _add(self._total, self.weight, last)
        elif not last and self.weight.dtype not in (torch.float32, torch.float64):
            self._total = self.weight.float()


def _add(total: Tensor, part: Tensor, last: bool) -> None:
    """total += part; last: and part becomes the total, rounded."""
    if total.device.type != "cpu":
        total.add_(part)
        if last:
            part.copy_(total)
        return
    # One pass of descent with rate -1, where torch's sum of two formats takes four times as long.
    flat, low = total.view(-1), part.view(-1)
    copies, one = [low if last else None], torch.ones(())
    sgd_([flat], [low], None, copies=copies, lr=-1.0, momentum=0.0, nesterov=False, weight_decay=0.0, scale=one)


def reference(
    x: Tensor, weight: Tensor, labels: Tensor, o: Options, want_x: bool, want_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, C], weight [V, C], labels [R], contiguous -> sum of the losses and its gradients (empty where not wanted), out of other operations."""
    sums = _Sums(x, weight, want_x, want_weight)
    total = torch.zeros((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    one = torch.ones((1,), dtype=total.dtype, device=x.device)
    size = chunk_rows(x.shape[0], weight.shape[0], x.element_size(), x.device)
    buffer = x.new_empty(min(size, x.shape[0]), weight.shape[0])
    for start in range(0, x.shape[0], size):
        rows = slice(start, min(start + size, x.shape[0]))
        logits = torch.mm(x[rows], weight.t(), out=buffer[: rows.stop - start])
        losses, lse = CROSS_ENTROPY.on(x.device)(logits, labels[rows], o)
        total += losses.sum()
        if any(sums.wanted):
            ones = one.expand(losses.shape[0])
            CROSS_ENTROPY_BACKWARD.on(x.device)(ones, logits, labels[rows], lse, o, logits)
            sums.add(rows, logits, x[rows], weight, last=rows.stop == x.shape[0])
    return total, sums.x, sums.weight


LINEAR_CROSS_ENTROPY = Operation("linear_cross_entropy", reference)


@torch.library.custom_op(
    "partita::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor labels, int ignore_index, float label_smoothing, float z_loss, bool want_x, bool want_weight)"
    " -> (Tensor, Tensor, Tensor)",
)
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    flat, options = labels.reshape(-1).contiguous(), Options(ignore_index, label_smoothing, z_loss)
    run = LINEAR_CROSS_ENTROPY.on(x.device)
    total, dx, dweight = run(as_rows(x).contiguous(), weight.contiguous(), flat, options, want_x, want_weight)
    return total, dx.view(x.shape) if want_x else dx, dweight


@_linear_cross_entropy.register_fake
def _linear_cross_entropy_fake(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    dx = x.new_empty(x.shape) if want_x else x.new_empty(0)
    return total, dx, weight.new_empty(weight.shape) if want_weight else weight.new_empty(0)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.wanted = inputs[-2:]
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)  # else zeros as large as the weight come into being for an output without a gradient
    ctx.save_for_backward(output[1], output[2])


def _differentiate(ctx, dtotal, _dx, _dw):  # type: ignore[no-untyped-def]
    # On a CPU a look at the factor is free, and the usual 1 saves a pass over the weight's gradient.
    plain = dtotal.device.type == "cpu" and not torch.compiler.is_compiling() and dtotal.item() == 1.0
    scaled = [g if plain else g * dtotal.to(g.dtype) for g in ctx.saved_tensors]
    return scaled[0] if ctx.wanted[0] else None, scaled[1] if ctx.wanted[1] else None, *[None] * 6


_linear_cross_entropy.register_autograd(_differentiate, setup_context=_save)
