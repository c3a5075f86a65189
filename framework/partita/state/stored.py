"""Between shards and what is stored: values that a parameter begins with, and the slices that a checkpoint saves and loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from partita.errors import PartitaError
from partita.state.bucket import Bucket
from partita.state.layout import Segment, StateLayout
from partita.state.slices import StateSlice
from partita.state.tiers import Array

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


def slices_of(bucket: Bucket, s: Segment, lo: int, hi: int) -> Iterator[StateSlice]:
    """All states of elements [lo, hi) of a parameter, which lie in this rank's shard."""
    yield from _like_the_weights(bucket, s, lo, hi, f"model.{s.name}", bucket.master)
    for name, state in bucket.formats.items():
        key, array = f"optimizer.{s.name}.{name}", bucket.arrays[name]
        if state.shape is not None:
            start, numel = bucket.own_shape(name, s)
            if lo == 0:  # where several ranks share the work, the first one has all of it
                yield StateSlice(key, state.shape(s.shape), array.dtype, 0, numel, array.near[start : start + numel])
        elif state.block > 1:
            first, last = -(-lo // state.block), -(-hi // state.block)
            at = (s.offset - bucket.index * bucket.layout.shard) // state.block
            shape = (-(-s.numel // state.block),)
            yield StateSlice(key, shape, array.dtype, first, last, array.near[at + first : at + last])
        else:
            yield from _like_the_weights(bucket, s, lo, hi, key, array)


def _like_the_weights(bucket: Bucket, s: Segment, lo: int, hi: int, key: str, array: Array) -> Iterator[StateSlice]:
    start = s.offset - bucket.index * bucket.layout.shard
    for at, to, n in list(s.part.runs(lo, hi)) or [(lo, lo, 0)] * (math.prod(s.part.shape) == 0):
        for a, b, data in array.spans(start + at, start + at + n):
            yield StateSlice(key, s.part.shape, data.dtype, to + a - start - at, to + b - start - at, data)


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
            if held is not None and held.device != device:
                module._buffers[key] = held.to(device)


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
