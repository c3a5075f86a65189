"""Hot operations over flat buffers, each once: callers use these names only."""

from partita_kernels.optimizer import adamw_, sgd_
from partita_kernels.reduce import squared_norm

__all__ = ["adamw_", "sgd_", "squared_norm"]
