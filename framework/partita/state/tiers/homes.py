"""Gives each state its home, as the plan's tiers say, and brings gradients there as their reductions end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from partita.errors import PartitaError
from partita.plan.plan import Tiers
from partita.state.layout import StateLayout, far_elements
from partita.state.tiers.array import Array
from partita.state.tiers.lane import Lane
from partita.state.tiers.tier import Done, Pending, Tier, aligned_empty

STOWING = 2  # reduced shards on their way to a tier at once


class Homes:
    """All tiers of one rank. built: the tier of each place that the plan names, but `accelerator`."""

    def __init__(self, layout: StateLayout, built: Mapping[str, Tier], device: torch.device) -> None:
        self.tiers: Tiers = layout.tiers
        self.lane = Lane(device)
        self._built, self._device = dict(built), device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._stowing: deque[tuple[Pending, torch.Tensor, Callable[[torch.Tensor], None]]] = deque()
        fractions = {
            t.fraction for t in (self.tiers.parameters, self.tiers.gradients, self.tiers.optimizer) if t.place != "accelerator"
        }
        if len(fractions) > 1:  # buffers are cut at one place for all states
            raise PartitaError(
                f"offloaded states must share one fraction; the plan has {sorted(fractions)}. Set offload.fraction."
            )
        for place, tier in self._built.items():
            tier.reserve(sum(layout.bytes(place).values()))

    def leaves(self, kind: str) -> bool:
        """Whether any of `parameters`, `gradients`, `optimizer` lies elsewhere than on the device."""
        return bool(getattr(self.tiers, kind).place != "accelerator")

    @property
    def any(self) -> bool:
        """Whether any state lies elsewhere."""
        return any(self.leaves(kind) for kind in ("parameters", "gradients", "optimizer"))

    def array(self, kind: str, numel: int, dtype: torch.dtype) -> Array:
        """A state of `numel` elements, all zero."""
        tier = getattr(self.tiers, kind)
        far = far_elements(numel, tier)
        near = torch.zeros(numel - far, dtype=dtype, device=self._device)
        return Array(near, self._built[tier.place].allocate(far, dtype) if far else None)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for a shard on its way to the device."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else aligned_empty(numel, dtype, self._device.type != "cpu")

    def give(self, buffer: torch.Tensor) -> None:
        """Hand it back."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def stow(self, array: Array, source: torch.Tensor, give: Callable[[torch.Tensor], None]) -> Pending:
        """Start to move `source` into `array`; `give` takes the buffer back later, in this thread."""
        while len(self._stowing) >= STOWING:
            self._end_oldest()
        pending = array.write(source)
        if isinstance(pending, Done):
            give(source)
            return pending
        self._stowing.append((pending, source, give))
        return pending

    def settle(self) -> None:
        """Return when nothing is on its way."""
        while self._stowing:
            self._end_oldest()

    def _end_oldest(self) -> None:
        pending, source, give = self._stowing.popleft()
        pending.settle()
        give(source)

    def close(self) -> None:
        """Give all memory of the tiers back."""
        self._stowing.clear()
        for tier in self._built.values():
            tier.close()
