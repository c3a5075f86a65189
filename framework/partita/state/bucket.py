"""One bucket at work: flat buffers of weights, gradients and optimizer states, and the two state machines over them.

Weights are `sharded` (only this rank's shard is current), `gathering` or `gathered`. Gradients are `filling`, `reducing` or `ready`.
Nothing here asks for a ZeRO stage: what is cut follows from the placement.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import reduce

import torch
from torch import nn

from partita.plan.plan import Placement
from partita.runtime.collectives import Collectives, Work, nested_all_gather, nested_reduce_scatter
from partita.runtime.collectives import Done as Nothing
from partita.runtime.mesh import Group
from partita.state.journal import Journal
from partita.state.layout import BucketLayout, Segment, StateLayout, dtype_of
from partita.state.optimizers import State
from partita.state.slices import Apart, StateSlice
from partita.state.tiers import Array, Done, Homes, Pending
from partita_kernels import put_squared, squared_norm

HOST = torch.device("cpu")


class Weights(Enum):
    """State of a bucket's weights on this rank."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(frozen=True)
class Groups:
    """Process groups of a bucket's states: `shard` along the axes that cut the optimizer (maybe none), `replicas` along all others
    over which its gradients are summed. copies: ranks of this stage that hold the same shard, this one the `copy`-th of them.

    levels: `shard` taken apart into nested cuts, outermost first, where weights or gradients are cut over fewer ranks than the
    optimizer; the first `weights` of them cut the weights, the first `gradients` the gradients between micro-batches.
    """

    shard: Group
    replicas: Group
    copies: int = 1
    copy: int = 0
    levels: tuple[Group, ...] = ()
    weights: int = 0
    gradients: int = 0

    @property
    def index(self) -> int:
        """Which shard is this rank's."""
        return reduce(lambda index, level: index * level.size + level.rank, self.levels, 0)


class BufferPool:
    """Reuses whole-bucket buffers: fresh memory costs page faults on every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with undefined contents."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


def _nothing() -> None:
    """No update is under way."""


class Bucket:
    """Flat buffers of one `BucketLayout` on this rank."""

    def __init__(
        self,
        layout: BucketLayout,
        state: StateLayout,
        groups: Groups,
        collectives: Collectives,
        pool: BufferPool,
        device: torch.device,
        wire: torch.dtype,
        homes: Homes,
        journal: Journal,
        alone: bool = False,
    ) -> None:
        """alone: nobody else adds to the gradients, and a model is so large that their norm is worth being found as they arrive."""
        self._journal = journal
        self.layout, self.groups, self._pool, self._homes = layout, groups, pool, homes
        self._collectives = collectives.for_bucket(layout, state, groups, self._read_state)
        self._placement: Placement = state.placement_of(layout)
        self.index = groups.index
        compute, master = dtype_of(state.precision.compute), dtype_of(state.precision.master)
        self._gradient_dtype, self._accumulator_dtype = state.gradient_dtype, dtype_of(state.precision.gradient)
        self._wire = wire  # of gradients on their way to be summed
        n = layout.shard
        self.full = torch.zeros(layout.padded, dtype=compute, device=device)
        self._bytes = self.full.untyped_storage().size()
        self._spans = self._nested_spans()
        self.cut = bool(self._placement.parameters) and (groups.shard.size > 1 or homes.leaves("parameters"))
        self.formats: Mapping[str, State] = state.states_of(layout)
        # a number for the first element of the bucket, far from those of other buckets, whatever the layout
        self.key = zlib.crc32(layout.segments[0].name.encode()) << 32 if layout.segments else 0
        self.key += self.index * n
        # What this rank keeps of the weights between uses: with narrower cuts more than the shard that it updates.
        self._held, self._narrower = self._make_held(compute)
        self._stale = self._narrower  # other ranks have changed their shards in `_held`
        # The shard of the weights that compute reads: in place where the whole bucket stays.
        parameter = Array(self._mine_held() if self._narrower else self._mine(self.full))
        if self._held is not None and not self._narrower:
            parameter = self._held
        # `parameter`, and of trainable buckets `master`, `gradient` and the optimizer's states
        self.arrays: dict[str, Array] = {"parameter": parameter}
        self.weights = Weights.GATHERED
        self._gathering: Work | None = None
        self._fetching: tuple[Pending, torch.Tensor] | None = None  # this rank's shard on its way from a tier
        self.gradient: torch.Tensor | None = None  # of the whole bucket
        self.reduced: torch.Tensor | None = None  # of this rank's shard
        self.partial: torch.Tensor | None = None  # summed over fewer ranks than share the optimizer
        self._stows = layout.trainable and homes.leaves("gradients")
        if layout.trainable:
            self.arrays["master"] = homes.array("optimizer", n, master) if state.separate_master(layout) else parameter
            self.arrays |= {
                k: homes.array("optimizer", state.state_numel(layout, f), dtype_of(f.dtype or ""))
                for k, f in self.formats.items()
            }
            self.arrays["gradient"] = self._make_gradient(n, device)
        # elements that lie on the device in every state
        self.keep = min(a.near.numel() for a in self.arrays.values()) if layout.policy == "element" else n
        self._reducing: Work | None = None
        self._stowing: Pending = Done()
        self._square: torch.Tensor | None = None
        self._filled = [False] * len(layout.segments)
        self._alone = alone and not self._stows
        self._arrived: list[float | None] = [0.0] * len(layout.segments)  # squared norms of this step's gradients, where known
        self._gaps = layout.gaps()
        self._accumulated = False  # `reduced` holds the sum of earlier micro-batches of this step
        self.parameters: list[nn.Parameter | None] = [None] * len(layout.segments)
        self._first_values: torch.Tensor | None = None
        self.wait_updated: Callable[[], None] = _nothing  # returns when no update of the weights is under way

    def _nested_spans(self) -> list[tuple[int, int]]:
        """(first element, elements) of what this rank has of the whole buffer after no, one, ... all levels of cuts."""
        spans = [(0, self.layout.padded)]
        for level in self.groups.levels:
            lo, n = spans[-1]
            spans.append((lo + level.rank * (n // level.size), n // level.size))
        return spans

    def _make_held(self, compute: torch.dtype) -> tuple[Array | None, bool]:
        """Memory of the weights between uses, where they are cut, and whether it is more than this rank's shard."""
        if not self.cut:
            return None, False
        _, n = self._spans[self.groups.weights]
        return self._homes.array("parameters", n, compute), n > self.layout.shard

    def _mine_held(self) -> torch.Tensor:
        """This rank's shard in `_held`."""
        assert self._held is not None
        start = self._spans[-1][0] - self._spans[self.groups.weights][0]
        return self._held.near[start : start + self.layout.shard]

    def _make_gradient(self, n: int, device: torch.device) -> Array:
        if self._stows:
            return self._homes.array("gradients", n, self._accumulator_dtype)
        if self.groups.shard.size == 1:  # whole gradients are reduced in place
            self.reduced = self.gradient = torch.zeros(self.layout.padded, dtype=self._gradient_dtype, device=device)
        else:
            self.reduced = torch.zeros(n, dtype=self._accumulator_dtype, device=device)
            if 0 < self.groups.gradients < len(self.groups.levels):
                wide = self._spans[self.groups.gradients][1]
                self.partial = torch.zeros(wide, dtype=self._accumulator_dtype, device=device)
        return Array(self.reduced)

    def _read_state(self, name: str) -> torch.Tensor:
        self.wait_updated()
        return self.arrays[name].whole()

    @property
    def own(self) -> Array:
        """This rank's shard of the weights that compute reads."""
        return self.arrays["parameter"]

    @property
    def master(self) -> Array:
        """This rank's shard of the weights that the optimizer updates; of frozen ones, and where both have one dtype, it is `own`."""
        return self.arrays.get("master", self.own)

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.index * self.layout.shard : (self.index + 1) * self.layout.shard]

    # ------------------------------------------------------------------ weights

    def bind(self, parameters: list[nn.Parameter]) -> None:
        """Make each parameter a permanent view of the whole buffer."""
        self.parameters = list(parameters)
        for parameter, s in zip(parameters, self.layout.segments, strict=True):
            parameter.data = self.full[s.offset : s.offset + s.numel].view(s.shape)

    def write(self, segment: int, value: torch.Tensor) -> None:
        """Set one whole parameter (any float dtype) in the compute copy, and in this rank's master when `written` is called."""
        s = self.layout.segments[segment]
        flat = value.reshape(-1)
        self.full[s.offset : s.offset + s.numel].copy_(flat)
        if self._first_values is None:
            self._first_values = torch.zeros(self.layout.shard, dtype=self.master.dtype, device=self.full.device)
        base = self.index * self.layout.shard
        lo, hi = max(base, s.offset), min(base + self.layout.shard, s.offset + s.numel)
        if lo < hi:
            self._first_values[lo - base : hi - base].copy_(flat[lo - s.offset : hi - s.offset])

    def written(self) -> None:
        """All parameters have been set: this rank's shards take them over."""
        values, self._first_values = self._first_values, None
        if values is None:
            return
        for array in {id(a): a for a in (self.master, self.own)}.values():
            array.write(values.to(array.dtype)).settle()

    def gather(self) -> None:
        """Start to make all weights current, if they are not."""
        if self.weights is not Weights.SHARDED:
            return
        self.wait_updated()
        if self.cut:
            self.full.untyped_storage().resize_(self._bytes)
            self._renew()
            self._fetched().wait()
        if self.groups.levels:
            self._journal.note(f"gather of {self.layout.unit}")
        levels = self.groups.levels[: self.groups.weights] if self.cut else self.groups.levels
        self._gathering = nested_all_gather(self._collectives, self.full, levels)
        self.weights = Weights.GATHERING

    def _renew(self) -> None:
        """Have all current that this rank keeps between uses: once after an update."""
        if self._stale:
            assert self._held is not None
            nested_all_gather(self._collectives, self._held.near, self.groups.levels[self.groups.weights :]).wait()
            self._stale = False

    def fetch(self) -> None:
        """Start to read this rank's shard from its tier, if the next `gather` needs it: before that, the disk works while others compute."""
        far = self.own.far
        slow = far is not None and far.on(self.full.device) is None and far.on(HOST) is None
        if slow and self.weights is Weights.SHARDED and self._fetching is None:
            self.wait_updated()
            into = self._homes.take(self.layout.shard, self.own.dtype)
            self._fetching = (self.own.read(into), into)

    def _fetched(self) -> Pending:
        """Bring what this rank keeps into the whole buffer."""
        if self._fetching is None:
            assert self._held is not None
            lo, n = self._spans[self.groups.weights]
            return self._held.read(self.full[lo : lo + n])
        pending, values = self._fetching
        pending.settle()
        self._fetching = None
        self._mine(self.full).copy_(values)
        self._homes.give(values)
        return Done()

    def wait_gathered(self) -> None:
        """Have all weights current."""
        self.wait_updated()
        self.gather()
        if self._gathering is not None:
            self._journal.wait(self._gathering, f"gather of {self.layout.unit}")
            self._gathering = None
        self.weights = Weights.GATHERED

    def free(self) -> None:
        """Give the whole buffer's memory back, where the placement cuts the weights."""
        if self.cut and self.weights is not Weights.SHARDED:
            self.wait_gathered()
            self.full.untyped_storage().resize_(0)
            self.weights = Weights.SHARDED

    def updated(self) -> None:
        """The optimizer changes this rank's shard: other ranks' shards are stale, and what was read ahead."""
        if self._fetching is not None:
            self._fetching[0].settle()
            self._homes.give(self._fetching[1])
            self._fetching = None
        if self.groups.shard.size > 1 or self.cut:
            if self.cut:
                self.free()
            self.weights, self._stale = Weights.SHARDED, self._narrower

    # ------------------------------------------------------------------ gradients

    def collect(self, segment: int, gradient: torch.Tensor) -> None:
        """Put or add one parameter's gradient into the whole-bucket buffer."""
        s = self.layout.segments[segment]
        into = self._buffer()[s.offset : s.offset + s.numel]
        flat = gradient.reshape(-1)
        if self._alone:
            self._arrived[segment] = put_squared(into, flat, add=self._filled[segment])
        elif self._filled[segment]:
            into.add_(flat)
        else:
            into.copy_(flat)
        self._filled[segment] = True

    def _buffer(self) -> torch.Tensor:
        if self.gradient is None:
            self.gradient = self._pool.take(self.layout.padded, self._gradient_dtype)
        return self.gradient

    def reduce(self) -> None:
        """Start the reduction of what has been collected; parameters without a gradient count as zero."""
        buffer = self._buffer()
        for filled, s in zip(self._filled, self.layout.segments, strict=True):
            if not filled:
                buffer[s.offset : s.offset + s.numel] = 0
        for lo, hi in self._gaps:
            buffer[lo:hi] = 0
        self._filled = [False] * len(self._filled)
        if self._stows:
            self.wait_updated()  # it reads the gradients of the last step
            self._take_reduced()
        assert self.reduced is not None
        if self.groups.shard.size * self.groups.replicas.size > 1:
            self._journal.note(f"reduction of {self.layout.unit}")
        if self.groups.shard.size > 1:
            levels = self.groups.levels[: self.groups.gradients] or self.groups.levels
            into = self.reduced if self.partial is None else self.partial
            self._reducing = nested_reduce_scatter(self._collectives, into, buffer, levels, self._wire, self._accumulated)
        else:
            self._reducing = self._collectives.all_reduce(buffer, self.groups.replicas, self._wire)

    def _take_reduced(self) -> None:
        """A buffer for the reduced shard on its way to the tier, with what has been summed before."""
        if self.groups.shard.size == 1:
            self.reduced = self.gradient
            return
        self.reduced = self._pool.take(self.layout.shard, self._accumulator_dtype)
        if self._accumulated:
            self._stowing.settle()
            self.arrays["gradient"].read(self.reduced).wait()

    def wait_reduced(self, last: bool) -> None:
        """Finish the reduction over the shard group, if one is under way. last: of this update."""
        if self._reducing is None:
            return
        self._journal.wait(self._reducing, f"reduction of {self.layout.unit}")
        self._reducing = None
        self._accumulated = True
        if self.groups.shard.size > 1:
            assert self.gradient is not None
            self._pool.give(self.gradient)
            self.gradient = None
        if self.partial is not None and last:
            assert self.reduced is not None
            levels = self.groups.levels[self.groups.gradients :]
            nested_reduce_scatter(self._collectives, self.reduced, self.partial, levels, self._wire, False).wait()
        if self._stows:
            self._stow(last)

    def _stow(self, last: bool) -> None:
        """Move the reduced shard to its tier; what has to be known of the final sum is found while it is here."""
        assert self.reduced is not None
        if last:
            if self.groups.shard.size > 1:
                self._collectives.all_reduce(self.reduced, self.groups.replicas, self._wire).wait()
            self._square = self._share_of_square(self.reduced)
        self._stowing = self._homes.stow(self.arrays["gradient"], self.reduced, self._pool.give)
        self.reduced = None
        if self.groups.shard.size == 1:
            self.gradient = None

    @contextmanager
    def changing(self) -> Iterator[torch.Tensor]:
        """The reduced shard, to be changed inside."""
        if not self._stows:
            assert self.reduced is not None
            yield self.reduced
            return
        self._stowing.settle()
        reduced = self._pool.take(self.layout.shard, self._accumulator_dtype)
        self.arrays["gradient"].read(reduced).wait()
        yield reduced
        self._square = self._share_of_square(reduced)
        self._stowing = self._homes.stow(self.arrays["gradient"], reduced, self._pool.give)

    def reduce_replicas(self) -> Work:
        """Start the sum over the ranks that hold the same shard; once, after the last micro-batch."""
        if self._stows:
            return Nothing()  # it was made before they left
        assert self.reduced is not None
        return self._collectives.all_reduce(self.reduced, self.groups.replicas, self._wire)

    def square(self, anew: bool = False) -> torch.Tensor:
        """This rank's share of the squared norm of the reduced gradients, 0-d: over all ranks that hold this shard or another, shares
        sum to the whole. Taken bucket by bucket, so that it doesn't depend on which of them left.

        anew: they have been changed since they arrived.
        """
        if self._stows:
            assert self._square is not None
            return self._square
        assert self.reduced is not None
        if self._alone and not anew:
            known = [square for square in self._arrived if square is not None]
            if len(known) == len(self._arrived):
                return torch.tensor(sum(known), dtype=torch.float64)
        return self._share_of_square(self.reduced)

    def _share_of_square(self, reduced: torch.Tensor) -> torch.Tensor:
        """Each of the ranks that hold the same shard looks at another part of it. Of groups that go their own ways the mean counts."""
        first, end = self.my_part(0, reduced.numel())
        return squared_norm([reduced[first:end]]) / self.apart().groups

    def my_part(self, first: int, end: int) -> tuple[int, int]:
        """Of a range of the shard: what is this rank's where the ranks with equal states divide it among them. May be empty."""
        equal = self.groups.copies // self.apart().groups
        mine, n = self.groups.copy % equal, end - first
        return first + n * mine // equal, first + n * (mine + 1) // equal

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self._accumulated = False
        self._arrived = [0.0] * len(self._arrived)

    # ------------------------------------------------------------------ views

    @property
    def collectives(self) -> Collectives:
        """Those of this bucket: for whoever provides them."""
        return self._collectives

    def wire_slices(self) -> list[StateSlice]:
        """What the collectives of this bucket hold for themselves, such as errors of compression."""
        return self._collectives.slices()

    def apart(self) -> Apart:
        """Whether copies of its states go their own ways."""
        return self._collectives.apart()

    def state_view(self, name: str, lo: int, hi: int, segment: Segment | None) -> torch.Tensor:
        """What belongs to elements [lo, hi) of this rank's shard in a state that lies on the device; `segment`: that they lie in."""
        state, values = self.formats[name], self.arrays[name].near
        if state.shape is None:
            return values[lo // state.block : -(-hi // state.block)]
        assert segment is not None
        start, numel = self.own_shape(name, segment)
        return values[start : start + numel]

    def own_shape(self, name: str, segment: Segment) -> tuple[int, int]:
        """Where in a state of a shape of its own a parameter of this rank has its elements: (first, count)."""
        shape, start = self.formats[name].shape, 0
        assert shape is not None
        for s, _, _ in self.layout.owned(self.index):
            if s.name == segment.name:
                return start, math.prod(shape(s.shape))
            start += math.prod(shape(s.shape))
        raise KeyError(segment.name)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(hyper-parameter group, lo, hi) ranges of this rank's shard."""
        yield from self.layout.runs(self.index)
