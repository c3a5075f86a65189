"""Hot operations, each once: a plain torch reference, a Triton kernel, a CPU path. Callers use these names only."""

from partita_kernels.adamw import adamw_
from partita_kernels.dispatch import OPERATIONS, Operation, replace, using
from partita_kernels.sgd import sgd_
from partita_kernels.squares import squared_norm

__all__ = ["OPERATIONS", "Operation", "adamw_", "replace", "sgd_", "squared_norm", "using"]
