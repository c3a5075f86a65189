"""Hot operations, each once: a plain torch reference, a Triton kernel, a CPU path. Callers use these names only.

Operations of layers and of the wire are imported when they are first used: registering them with torch takes a quarter of a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from partita_kernels.adamw import adamw_
from partita_kernels.dispatch import OPERATIONS, Operation, replace, using
from partita_kernels.lion import lion_
from partita_kernels.rounding import Rounding
from partita_kernels.sgd import sgd_
from partita_kernels.squares import put_squared, squared_norm

if TYPE_CHECKING:
    from partita_kernels.flash import attention, attention_piece, attention_piece_backward, visible
    from partita_kernels.glu import geglu, swiglu, swiglu_halves
    from partita_kernels.grouped import grouped_matmul
    from partita_kernels.linear_loss import linear_cross_entropy
    from partita_kernels.loss import cross_entropy
    from partita_kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
    from partita_kernels.parallel_loss import vocab_parallel_cross_entropy
    from partita_kernels.permutation import Order, expert_order, permute, unpermute
    from partita_kernels.quantize import dequantize_blocks_, dequantize_int8, quantize_blocks, quantize_blocks_, quantize_int8
    from partita_kernels.rotary import rope, rope_angles
    from partita_kernels.routing import route
    from partita_kernels.signs import pack_signs, unpack_signs

__all__ = [
    "OPERATIONS",
    "Operation",
    "Order",
    "Rounding",
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_piece",
    "attention_piece_backward",
    "cross_entropy",
    "dequantize_blocks_",
    "dequantize_int8",
    "expert_order",
    "geglu",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "lion_",
    "pack_signs",
    "permute",
    "put_squared",
    "quantize_blocks",
    "quantize_blocks_",
    "quantize_int8",
    "replace",
    "rms_norm",
    "rope",
    "rope_angles",
    "route",
    "sgd_",
    "squared_norm",
    "swiglu",
    "swiglu_halves",
    "unpack_signs",
    "unpermute",
    "using",
    "visible",
    "vocab_parallel_cross_entropy",
]

_WHERE = {
    "flash": ("attention", "attention_piece", "attention_piece_backward", "visible"),
    "glu": ("geglu", "swiglu", "swiglu_halves"),
    "grouped": ("grouped_matmul",),
    "linear_loss": ("linear_cross_entropy",),
    "loss": ("cross_entropy",),
    "norm": ("add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"),
    "permutation": ("Order", "expert_order", "permute", "unpermute"),
    "parallel_loss": ("vocab_parallel_cross_entropy",),
    "quantize": ("dequantize_blocks_", "dequantize_int8", "quantize_blocks", "quantize_blocks_", "quantize_int8"),
    "rotary": ("rope", "rope_angles"),
    "routing": ("route",),
    "signs": ("pack_signs", "unpack_signs"),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f"partita_kernels.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module 'partita_kernels' has no attribute {name!r}")
