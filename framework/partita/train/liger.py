"""Slot `kernel`, name `liger`: Triton kernels of liger-kernel (Hsu et al. 2024) behind the signatures of partita_kernels. For accelerators.

Some of its kernels write over their inputs, which others may still read: those get copies. What liger can't do is refused when it is asked for
it; none of ours stands in.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from partita.errors import ConfigError
from partita.plugin.wording import complaint
from partita_kernels.dispatch import TRITON_DEVICES
from partita_kernels.loss import Options

Tensor = torch.Tensor
Implementation = Callable[..., Any]

OLDEST = "0.8.5"
WIDEST = 65536  # row of a norm or a gated unit
SILU, GELU_TANH = 0, 1


def make_liger(operation: str) -> Implementation:
    """Its implementation of an operation. Raises ConfigError where it has none, or isn't installed."""
    if operation not in OPERATIONS:
        raise ConfigError(complaint(f"liger has no implementation of {operation!r}", f"It has {', '.join(OPERATIONS)}."))
    remedy = "pip install 'partita[liger]', or leave liger out."
    try:
        import liger_kernel.ops  # noqa: F401
        from packaging.version import Version  # which it needs, too

        found = importlib.metadata.version("liger-kernel")
    except ImportError as error:
        raise ConfigError(complaint(f"liger-kernel can't be imported ({error})", remedy)) from error
    if Version(found) < Version(OLDEST):
        raise ConfigError(complaint(f"liger-kernel {found} is older than {OLDEST}, whose functions are called here", remedy))
    implementation = OPERATIONS[operation]
    implementation.accelerator = True  # type: ignore[attr-defined]  # a plan without one refuses it
    return implementation


def _check(operation: str, x: Tensor, unfit: str = "") -> None:
    """Raises ConfigError for what its kernels don't take; unfit: more that they don't."""
    if x.device.type not in TRITON_DEVICES and not _interpreted():
        unfit = f"its kernels need an accelerator, and the tensors are on {x.device.type}"
    elif x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        unfit = f"its kernels don't compute in {x.dtype}"
    elif x.shape[-1] > WIDEST and operation in ("norm", "glu"):
        unfit = f"its kernels take rows of up to {WIDEST} elements, not {x.shape[-1]}"
    if unfit:
        raise ConfigError(complaint(f"kernels.replace.{operation}=liger: {unfit}", "Leave the entry out: ours is the default."))


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


# ---- gated units


def _glu(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    from liger_kernel.ops.geglu import geglu_forward
    from liger_kernel.ops.swiglu import swiglu_forward

    _check("glu", gate, "" if kind in (SILU, GELU_TANH) else "it has GELU by tanh, not by the error function")
    if not gate.numel():
        return torch.empty_like(gate)
    forward = swiglu_forward if kind == SILU else geglu_forward
    return forward(gate.contiguous(), up.contiguous())[2]


def _glu_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.geglu import geglu_backward
    from liger_kernel.ops.swiglu import swiglu_backward

    _check("glu", gate, "" if kind in (SILU, GELU_TANH) else "it has GELU by tanh, not by the error function")
    if not gate.numel():
        return torch.empty_like(gate), torch.empty_like(up)
    backward = swiglu_backward if kind == SILU else geglu_backward
    dgate, dup = backward(*(_copy(t) for t in (gate, up)), dy.contiguous())
    return dgate, dup


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


# ---- norms

CASTING, CASTING_NUMBER = (
    "gemma",
    1,
)  # of liger's modes the one that computes in float32 up to the end, and its number for backward


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.layer_norm import layer_norm_forward
    from liger_kernel.ops.rms_norm import rms_norm_forward

    _check("norm", x)
    none, mean = x.new_empty(0), x.new_empty(x.shape[0] if center else 0, dtype=torch.float32)
    if not x.numel():
        return torch.empty_like(x), none if residual is None else torch.empty_like(x), mean, mean.new_empty(x.shape[0])
    x = x.contiguous()
    if center:
        total = x if residual is None else x + residual
        y, _, mean, rstd, *_ = layer_norm_forward(total, weight, torch.zeros_like(weight) if bias is None else bias, eps)
        return y, none if residual is None else total, mean, rstd
    if residual is None:
        y, _, rstd, *_ = rms_norm_forward(x, weight, eps, 0.0, CASTING, None)
        return y, none, mean, rstd
    y, total, rstd, *_ = fused_add_rms_norm_forward(x, residual.contiguous(), weight, eps, 0.0, CASTING)
    return y, total, mean, rstd


def _norm_backward(
    dy: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from liger_kernel.ops.layer_norm import layer_norm_backward
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    _check("norm", dy)
    if not dy.numel():
        return torch.empty_like(dy), torch.zeros_like(weight), torch.zeros_like(weight) if center else weight.new_empty(0)
    dy, total = dy.contiguous(), total.contiguous()
    if center:
        dx, dweight, dbias = layer_norm_backward(dy, total, weight, weight, mean, rstd)
        return dx, dweight, dbias
    block, warps = calculate_settings(dy.shape[1])
    dx, dweight = rms_norm_backward(dy, total, weight, rstd, 0.0, CASTING_NUMBER, block, warps, False, None)
    return dx, dweight, weight.new_empty(0)


# ---- rotary positions


def _rope(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    from liger_kernel.ops.rope import rope_backward, rope_forward

    _check("rope", x)
    b, _, t, d = x.shape
    # It turns queries and keys together, in place and laid out by token: the keys are a head of nothing.
    turned = x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    if x.numel():
        none = x.new_zeros(b, t, 1, d).transpose(1, 2)
        turn = rope_backward if back else rope_forward
        turned = turn(turned, none, cos, sin, rotary_dim=d)[0]
    return turned


# ---- losses


def _cross_entropy(logits: Tensor, labels: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """Its kernel gives losses alone: from the plain ones follow the log-sum-exps, and from these what smoothing and z-loss add."""
    _check("cross_entropy", logits)
    known = (labels >= 0) & (labels < logits.shape[1])
    target = labels.where(known, 0)  # of ignored rows it would write over the logits
    losses = _launch(logits, target, Options(), gradients=False)
    picked = logits.gather(1, target[:, None])[:, 0].float()
    lse = losses + picked
    if o.label_smoothing:
        losses = losses + o.label_smoothing * (picked - logits.mean(1, dtype=torch.float32))
    losses = losses + o.z_loss * lse.square()
    return losses.masked_fill(~known, float("nan")).masked_fill(labels == o.ignore_index, 0.0), lse


def _cross_entropy_backward(dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, o: Options, out: Tensor) -> None:
    """Its kernel turns logits into gradients in place, and computes their log-sum-exps anew."""
    shards = o.classes not in (0, logits.shape[1])
    _check(
        "cross_entropy_backward", logits, "it has no share of the classes, as vocabulary-parallel logits are" if shards else ""
    )
    known = (labels >= 0) & (labels < logits.shape[1])
    if out.data_ptr() != logits.data_ptr():
        out.copy_(logits)
    _launch(out, labels.where(known, 0), o, gradients=True)
    factors = dlosses.masked_fill(~known, float("nan")).masked_fill(labels == o.ignore_index, 0.0)
    out.mul_(factors.to(out.dtype)[:, None])
    out.masked_fill_((labels == o.ignore_index)[:, None], 0.0)


def _launch(x: Tensor, target: Tensor, o: Options, gradients: bool) -> Tensor:
    """Losses of the rows [R], float32; gradients: and x becomes their gradient."""
    import triton
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    rows, classes = x.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=x.device)
    if x.numel():
        liger_cross_entropy_kernel[(rows,)](
            X_ptr=x, X_stride=x.stride(0), Y_ptr=target, Y_stride=1, weight_ptr=None, loss_ptr=losses, z_loss_ptr=None, loss_stride=1,
            token_accuracy_ptr=None, token_accuracy_stride=0, predicted_tokens_ptr=None, predicted_tokens_stride=0, n_cols=classes,
            n_non_ignore=rows, sum_non_ignore_weight=rows, weight_sum=0.0, ignore_index=-1, lse_square_scale=o.z_loss,
            label_smoothing=o.label_smoothing, reduction="sum", softcap=None, RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False, BLOCK_SIZE=min(MAX_FUSED_SIZE, triton.next_power_of_2(classes)), HAS_WEIGHT=False,
            HAS_SOFTCAPPING=False, HAS_GRADIENTS=gradients, num_warps=16 if torch.version.hip else 32,
        )  # fmt: skip
    return losses


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, o: Options, want_x: bool, want_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    _check("linear_cross_entropy", x)
    none = x.new_empty(0), weight.new_empty(0)
    if not x.numel():
        empty = torch.empty_like(x) if want_x else none[0]
        return x.new_zeros((), dtype=torch.float32), empty, torch.zeros_like(weight) if want_weight else none[1]
    # A label that is no class would be read behind the row. Ours gives NaN, and so does this, without a look at the host.
    wrong = (labels != o.ignore_index) & ((labels < 0) | (labels >= weight.shape[0]))
    total, _, _, _, dx, dweight, _ = fused_linear_cross_entropy_forward(
        x, weight, labels.where(~wrong, o.ignore_index), ignore_index=o.ignore_index, lse_square_scale=o.z_loss,
        label_smoothing=o.label_smoothing, reduction="sum", accum_dtype=torch.float32, compute_gradients=want_x or want_weight,
        weight_requires_grad=want_weight,
    )  # fmt: skip
    total = total.masked_fill(wrong.any(), float("nan"))
    return total, dx if want_x else none[0], dweight if want_weight else none[1]


OPERATIONS: dict[str, Implementation] = {
    "glu": _glu,
    "glu_backward": _glu_backward,
    "norm": _norm,
    "norm_backward": _norm_backward,
    "rope": _rope,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "linear_cross_entropy": _linear_cross_entropy,
}
