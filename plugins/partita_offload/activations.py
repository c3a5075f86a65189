"""What blocks keep for backward, on the host meanwhile (Ren et al. 2021, ZeRO-Offload; torch's saved-tensor hooks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn

from partita.state.tiers.lane import Lane
from partita.state.tiers.tier import Done, Pending
from partita.state.units import find_units

SMALL = 16 * 1024  # bytes below which a copy costs more than it saves


class HostBuffers:
    """Host memory that is used again: taking new pages in every step is slow, and pinning them slower."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self.bytes = 0  # of all buffers there are

    def take(self, size: int) -> torch.Tensor:
        """A buffer of `size` bytes with undefined contents."""
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self.bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand it back."""
        self._free[buffer.numel()].append(buffer)


class Kept:
    """One storage on the host. It comes back for its first use in backward and goes after the last; the graph holds this object."""

    def __init__(self, source: torch.Tensor, buffers: HostBuffers, lane: Lane) -> None:
        self._buffers, self._lane, self._device = buffers, lane, source.device
        self._host = buffers.take(source.numel())
        self._leaving: Pending = lane.copy(self._host, source)
        self._back: torch.Tensor | None = None
        self._coming: Pending = Done()
        self.uses = self._left = 0

    def start(self) -> None:
        """Begin to bring it back."""
        if self._back is None:
            self._leaving.settle()
            self._back = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
            self._coming = self._lane.copy(self._back, self._host)
            self._left = self.uses

    def take(self) -> torch.Tensor:
        """Its bytes on the device."""
        self.start()
        assert self._back is not None
        self._coming.wait()
        back = self._back
        self._left -= 1
        if not self._left:
            self._back = None
        return back

    def __del__(self) -> None:
        self._leaving.settle()
        self._buffers.give(self._host)


class Offloader:
    """Saved-tensor hooks for the blocks of one model. fraction: of the bytes that may leave."""

    def __init__(self, model: nn.Module, fraction: float) -> None:
        self._model, self._fraction = model, fraction
        self._stay: set[int] | None = None  # storages of weights and buffers: their home is not ours to choose
        self._lane: Lane | None = None
        self.buffers: HostBuffers | None = None
        self._seen = self._sent = 0
        self._here: dict[tuple[int, int], tuple[torch.Tensor, Kept | None]] = {}
        self._last: list[ref[Kept]] = []  # of the block before

    def wrap(self, forward: Callable[..., Any], first: bool) -> Callable[..., Any]:
        """`forward` of a block whose saved tensors leave; `first`: no block comes before it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            own: list[ref[Kept]] = []
            before = [] if first else self._last
            self._last = own
            try:
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t: self._pack(t, own), lambda packed: self._unpack(packed, before)
                ):
                    return forward(*args, **kwargs)
            finally:
                self._here.clear()

        return run

    def _pack(self, tensor: torch.Tensor, own: list[ref[Kept]]) -> Any:
        if self._stay is None:
            self._begin(tensor.device)
        assert self._stay is not None
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < SMALL or storage._cdata in self._stay or tensor.device.type == "meta":
            return tensor
        key = (storage._cdata, tensor._version)
        if key not in self._here:
            # the tensor stays until the block ends, so that its address isn't another's meanwhile
            self._here[key] = (tensor.detach(), self._send(tensor, size))
        kept = self._here[key][1]
        if kept is None:
            return tensor
        if not kept.uses:
            own.append(ref(kept))
        kept.uses += 1
        return kept, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _begin(self, device: torch.device) -> None:
        held = [*self._model.parameters(), *self._model.buffers()]
        self._stay = {t.untyped_storage()._cdata for t in held}
        self._lane = Lane(device)
        self.buffers = HostBuffers(device.type != "cpu")

    def _send(self, tensor: torch.Tensor, size: int) -> Kept | None:
        self._seen += size
        if self._sent + size > self._fraction * self._seen:
            return None
        self._sent += size
        assert self.buffers is not None
        assert self._lane is not None
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            return Kept(whole, self.buffers, self._lane)

    def _unpack(self, packed: Any, before: list[ref[Kept]]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        kept, dtype, size, stride, offset = packed
        if kept._device.type != "cpu":  # there a copy is no transfer, and can't run beside the compute
            for earlier in before:
                if (found := earlier()) is not None:
                    found.start()
            before.clear()
        bytes_: torch.Tensor = kept.take()
        return torch.empty(0, dtype=dtype, device=bytes_.device).set_(bytes_.untyped_storage(), offset, size, stride)


def offload_activations(model: nn.Module, fraction: float) -> nn.Module:
    """Make what the blocks keep for backward wait on the host. The model is changed in place; names, hooks and weights stay."""
    offloader = Offloader(model, fraction)
    for i, (_, block) in enumerate(find_units(model)):
        block.forward = offloader.wrap(block.forward, first=i == 0)  # type: ignore[method-assign]
    model.partita_offloader = offloader  # type: ignore[assignment]
    return model
