"""Between shards and a checkpoint: the slices of all states that a rank saves, and those that it loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace

from torch import nn

from partita.state.bucket import Bucket
from partita.state.layout import Segment
from partita.state.slices import StateSlice
from partita.state.tiers import Array


def slices_to_save(buckets: Iterable[Bucket], owns: Callable[[Bucket], bool]) -> list[StateSlice]:
    """This rank's share of the states in `buckets` that it `owns`: ranks that hold the same shard divide the work among them.

    Of groups that go their own ways each saves what differs.
    """
    out: list[StateSlice] = []
    for bucket in buckets:
        out += [s for s in bucket.wire_slices() if s.saved]
        if not owns(bucket):
            continue
        apart = bucket.apart()
        writes_empty = bucket.my_part(0, 1) == (0, 1)  # one of the ranks with equal states
        for s, lo, hi in bucket.layout.owned(bucket.index):
            a, b = bucket.my_part(lo, hi)
            if a < b or (lo == hi and writes_empty):
                mine = slices_of(bucket, s, a, b)
                out += [
                    replace(x, key=apart.own(x.key) or x.key)
                    for x in mine
                    if not apart.group or apart.weights or not x.key.startswith("model.")
                ]
    return out


def slices_to_load(buckets: Iterable[Bucket]) -> list[StateSlice]:
    """The states in `buckets` as far as this rank holds them, as views."""
    out: list[StateSlice] = []
    for bucket in buckets:
        for s, lo, hi in bucket.layout.owned(bucket.index):
            out += [replace(x, own=bucket.apart().own(x.key)) for x in slices_of(bucket, s, lo, hi)]
        out += [replace(s, optional=True) for s in bucket.wire_slices()]
    return out


def buffer_slices(model: nn.Module, names: Container[str] | None = None) -> list[StateSlice]:
    """The module's persistent buffers, whole, as views. names: only these."""
    hidden = {f"{p}.{k}" if p else k for p, m in model.named_modules() for k in m._non_persistent_buffers_set}
    return [
        StateSlice(f"buffer.{name}", tuple(b.shape), b.dtype, 0, b.numel(), b.detach().view(-1))
        for name, b in model.named_buffers()
        if name not in hidden and (names is None or name in names)
    ]


def renew_copies(buckets: Iterable[Bucket]) -> None:
    """After a load has written the shards: the weights that compute reads follow the masters."""
    for bucket in buckets:
        for array in bucket.arrays.values():
            array.flush()
        if bucket.own is not bucket.master:
            bucket.own.write(bucket.master.whole().to(bucket.own.dtype)).settle()
        bucket.updated()


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
