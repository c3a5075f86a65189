"""What collectives a rank has made, so that ranks that diverge are told so by name instead of hanging or mixing up their weights."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import torch

from partita.errors import PartitaError

BITS = 20  # of the digest: the sum of the squares over 8192 ranks is exact in float64


class Journal:
    """The sequence of gathers and reductions of one rank. rank: this one's number."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._last: deque[str] = deque(maxlen=4)
        self.count = self.digest = 0

    def note(self, what: str) -> None:
        """A collective begins."""
        self.count += 1
        self._last.append(what)
        self.digest = (self.digest * 31 + zlib.crc32(what.encode())) & ((1 << BITS) - 1)

    def wait(self, work: Any, what: str) -> None:
        """`work.wait()`; raises PartitaError that names rank and unit where the backend gives up."""
        try:
            work.wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PartitaError(
                f"rank {self._rank} waited in vain for the {what}: {reason}. {self.where()}. Another rank has failed, or runs other "
                "parts of the model: every rank must run the same blocks in the same order (look at control flow that depends on data)."
            ) from error

    def where(self) -> str:
        """How far this rank is."""
        return f"It is its collective number {self.count}; the last were: {', '.join(self._last)}"

    def values(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Two numbers whose sums over all ranks tell whether the sequences are equal."""
        return torch.tensor([float(self.digest), float(self.digest) ** 2], dtype=dtype, device=device)

    def compare(self, total: float, squares: float, ranks: int) -> None:
        """Raises PartitaError where the sums of `values` over `ranks` ranks show different sequences."""
        if total * total != squares * ranks:
            raise PartitaError(
                f"rank {self._rank}: the ranks did not run the same blocks in the same order, so weights or gradients of different blocks "
                f"may have met. {self.where()}. Every rank must run the same blocks (look at control flow that depends on data)."
            )
