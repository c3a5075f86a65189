"""Copies between host and device beside the compute: on a stream of their own; on a CPU plain copies."""

from __future__ import annotations

from typing import Any

import torch

from partita.state.tiers.tier import Done, Pending


class Lane:
    """One direction-less copy stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.Stream(device) if device.type != "cpu" else None

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> Pending:
        """Start into.copy_(source), after what this thread has started on the device so far."""
        if self._stream is None or into.device == source.device:
            into.copy_(source)
            return Done()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            into.copy_(source, non_blocking=True)
        for tensor in (into, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(self._stream)
        return _Event(self._stream.record_event(), self._device, (into, source))


class _Event:
    """A copy on the stream; holds its tensors until it is done."""

    def __init__(self, event: Any, device: torch.device, held: Any) -> None:
        self._event, self._device, self._held = event, device, held

    def wait(self) -> None:
        """See `Pending`."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def settle(self) -> None:
        """See `Pending`."""
        self._event.synchronize()
        self._held = None
