"""What states begin with, and the bytes that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from partita.errors import PartitaError
from partita.state.bucket import Bucket
from partita.state.layout import Segment, StateLayout

Source = Callable[[str, tuple[int, ...]], torch.Tensor]


def initial(source: Source, segment: Segment) -> torch.Tensor:
    """What a parameter begins with on this rank. Raises PartitaError where the source has another shape."""
    part, reader = segment.part, getattr(source, "part", None)
    value = reader(segment.name, part) if reader is not None and part.ranges else None
    if value is None:
        whole = source(segment.name, part.shape)
        if tuple(whole.shape) != part.shape:
            raise PartitaError(f"weights of {segment.name!r} have shape {tuple(whole.shape)}; the model wants {part.shape}")
        value = part.take(whole)
    return value


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Have all buffers of a model on the device, with their values. Raises PartitaError where nothing fills one."""
    for module in model.modules():
        init = getattr(module, "init_buffers", None)
        if init is not None:
            init(device)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PartitaError(f"buffer {name!r} is on the meta device and its module has no init_buffers(device) to fill it")
    for module in model.modules():
        for key, held in module._buffers.items():
            if held is not None and (held.device != device or not held.is_contiguous()):  # loads write into them
                module._buffers[key] = held.to(device).contiguous()


def allocated(buckets: Sequence[Bucket], layout: StateLayout, place: str) -> dict[str, int]:
    """Bytes of states at rest in one place, by category, read from the buffers themselves."""
    total = {}
    states = {k for rule in layout.rules for k in rule.states}
    kinds = {"parameters": ("parameter",), "gradients": ("gradient",), "optimizer": ("master", *states)}
    for category, names in kinds.items():
        arrays = {id(b.arrays[k]): b.arrays[k] for b in buckets for k in names if k in b.arrays}
        if category == "optimizer":
            arrays = {i: a for i, a in arrays.items() if all(a is not b.own for b in buckets)}
        if place != "accelerator":
            here = getattr(layout.tiers, category).place == place
            total[category] = sum(a.far.numel * a.dtype.itemsize for a in arrays.values() if a.far is not None) if here else 0
            continue
        near = [a.near for a in arrays.values()]
        if category == "gradients":
            near += [t for b in buckets for t in (b.gradient, b.partial) if t is not None]
        total[category] = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in near}.values())
    return total
