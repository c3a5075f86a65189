"""Between shards and what is stored: values that a parameter begins with, and the slices that a checkpoint saves and loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from partita.errors import PartitaError
from partita.state.bucket import Bucket
from partita.state.layout import Segment
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
