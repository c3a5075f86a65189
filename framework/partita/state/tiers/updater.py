"""Updates what lies in tiers, on a thread of its own, extent by extent: the next one is read and the last one written meanwhile.

Training goes on with the next forward pass; who needs a bucket's weights waits for that bucket. The compute runs where the optimizer
states lie: on the host if they left the device (Ren et al. 2021, ZeRO-Offload, section 4; Rajbhandari et al. 2021, ZeRO-Infinity, section 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from partita.state.optimizers import Rule, Update
from partita.state.tiers.array import Array, Resident
from partita.state.tiers.lane import Lane
from partita.state.tiers.tier import Pending, Store, aligned_empty

if TYPE_CHECKING:
    from partita.state.bucket import Bucket
    from partita.state.layout import HyperGroup

EXTENT = 1 << 20  # elements read, updated and written at once: large enough for any disk, small enough to hold several
SLOTS = 4  # extents in memory: two are read, one updated, one written
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Operand:
    """One state of an extent: elements [lo, lo + extent) of a store. direct: to be used in place; None: has to be staged."""

    name: str
    store: Store
    lo: int
    direct: torch.Tensor | None
    reads: bool
    writes: bool


@dataclass(frozen=True)
class Extent:
    """Elements [lo, lo + size) of one bucket's shard. runs: (hyper-parameter group, lo, hi) in elements of the extent."""

    bucket: int
    lo: int
    size: int
    place: torch.device
    operands: tuple[Operand, ...]
    runs: tuple[tuple[int, int, int], ...]


@dataclass
class Slot:
    """Staging memory of one extent, allocated when first needed, and what is on its way from or to it."""

    buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = field(default_factory=dict)
    extent: Extent | None = None
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    reading: list[Pending] = field(default_factory=list)
    writing: list[Pending] = field(default_factory=list)

    def begin(self, extent: Extent, pinned: bool) -> None:
        """Start to read what has to be staged."""
        self.extent, self.reading = extent, []
        for o in extent.operands:
            value = self._staging(o, extent, pinned) if o.direct is None else o.direct
            self.values[o.name] = value
            if o.direct is None and o.reads:
                self.reading.append(o.store.read(o.lo, value))

    def _staging(self, o: Operand, extent: Extent, pinned: bool) -> torch.Tensor:
        key = (o.name, o.store.dtype, extent.place)
        if key not in self.buffers:
            on_host = extent.place.type == "cpu"
            self.buffers[key] = (
                aligned_empty(EXTENT, o.store.dtype, pinned)
                if on_host
                else torch.empty(EXTENT, dtype=o.store.dtype, device=extent.place)
            )
        return self.buffers[key][: extent.size]

    def ready(self) -> None:
        """Return when everything has been read."""
        for pending in self.reading:
            pending.settle()

    def write_back(self) -> None:
        """Start to write what was staged and changed."""
        assert self.extent is not None
        self.writing = [o.store.write(o.lo, self.values[o.name]) for o in self.extent.operands if o.direct is None and o.writes]

    def finish(self) -> Extent | None:
        """Return when everything has been written; the extent that is done now, if there was one."""
        for pending in self.writing:
            pending.settle()
        extent, self.extent, self.writing = self.extent, None, []
        return extent


class FarUpdater:
    """The updates of all that is not wholly on the device.

    buckets: in the order in which the next forward pass needs them. Each has `arrays` (`parameter`, `gradient`, `master`, states) and
    `keep`, the elements that an update on the device takes care of.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Sequence[HyperGroup],
        rules: Sequence[Rule],
        device: torch.device,
        lane: Lane,
    ) -> None:
        self._buckets, self._groups, self._rules = list(buckets), groups, rules
        self._index = {id(b): i for i, b in enumerate(self._buckets)}
        self._device, self._lane = device, lane
        self._extents = [e for i, b in enumerate(self._buckets) for e in self._cut(i, b)]
        self._slots = [Slot() for _ in range(SLOTS)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="partita-update") if self._extents else None
        self._done: dict[int, Future[None]] = {}
        self._job: Future[None] | None = None

    # ------------------------------------------------------------------ what to do

    def _cut(self, index: int, bucket: Bucket) -> list[Extent]:
        n, keep = bucket.layout.shard, bucket.keep
        if keep == n:
            return []
        away = any(
            bucket.arrays[k].far is not None
            for k in ("master", *bucket.formats)
            if bucket.arrays[k] is not bucket.arrays["parameter"]
        )
        place = HOST if away else self._device
        separate = bucket.arrays["master"] is not bucket.arrays["parameter"]
        uses = [("master", True, True), *((k, True, True) for k in bucket.formats), ("gradient", True, False)]
        uses += [("parameter", False, True)] if separate else []
        runs = list(bucket.runs())
        out = []
        step = EXTENT if any(self._direct(bucket.arrays[k], keep, n, place)[1] is None for k, _, _ in uses) else n
        for lo in range(keep, n, step):
            hi = min(n, lo + step)
            operands = tuple(Operand(k, *self._operand(bucket.arrays[k], lo, hi, place), r, w) for k, r, w in uses)
            own = tuple((g, max(a, lo) - lo, min(b, hi) - lo) for g, a, b in runs if a < hi and b > lo)
            if own:
                out.append(Extent(index, lo, hi - lo, place, operands, own))
        return out

    def _direct(self, array: Array, lo: int, hi: int, place: torch.device) -> tuple[Store, torch.Tensor | None, int]:
        """(store, the store's own memory where `place` can use it, first element in it)."""
        keep = array.near.numel()
        store: Store = Resident(array.near, self._lane) if array.far is None else array.far
        start = lo if array.far is None else lo - keep
        memory = store.on(place)
        return store, None if memory is None else memory[start : start + hi - lo], start

    def _operand(self, array: Array, lo: int, hi: int, place: torch.device) -> tuple[Store, int, torch.Tensor | None]:
        store, direct, start = self._direct(array, lo, hi, place)
        return store, start, direct

    # ------------------------------------------------------------------ for the training thread

    def start(self, step: int, lr: float, scale: torch.Tensor) -> None:
        """Begin the update number `step`; the arguments are those of `Rule.update`. The one before must have been drained."""
        if self._thread is None:
            return
        self._done = {e.bucket: Future() for e in self._extents}
        self._job = self._thread.submit(self._run, step, lr, scale.to(HOST, copy=True), dict(self._done))

    def wait(self, bucket: Bucket) -> None:
        """Return when the weights of `bucket` are those after the update. Raises PartitaError where the update failed."""
        done = self._done.pop(self._index[id(bucket)], None) if self._done else None
        if done is not None:
            done.result()

    def drain(self) -> None:
        """Return when the update is complete in every tier."""
        self._done = {}
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """End the thread; an update under way is finished first, and its errors are dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ on the thread

    @torch.no_grad()
    def _run(self, step: int, lr: float, scale: torch.Tensor, done: dict[int, Future[None]]) -> None:
        left = {i: sum(e.bucket == i for e in self._extents) for i in done}
        scales = {HOST: scale, self._device: scale.to(self._device)}

        def count(extent: Extent | None) -> None:
            if extent is not None:
                left[extent.bucket] -= 1
                if not left[extent.bucket]:
                    done[extent.bucket].set_result(None)

        try:
            ahead: deque[Slot] = deque()
            for i, extent in enumerate(self._extents):
                slot = self._slots[i % SLOTS]
                count(slot.finish())
                slot.begin(extent, self._device.type != "cpu")
                ahead.append(slot)
                if len(ahead) == SLOTS - 1:
                    count(self._process(ahead.popleft(), step, lr, scales))
            while ahead:
                count(self._process(ahead.popleft(), step, lr, scales))
            for slot in self._slots:
                count(slot.finish())
        except BaseException as error:
            for future in done.values():
                if not future.done():
                    future.set_exception(error)
            raise

    def _process(self, slot: Slot, step: int, lr: float, scales: dict[torch.device, torch.Tensor]) -> Extent | None:
        """Update one extent; returns it if nothing of it is left to be written."""
        slot.ready()
        extent = slot.extent
        assert extent is not None
        values, copies = slot.values, any(o.name == "parameter" for o in extent.operands)
        bucket = self._buckets[extent.bucket]
        for group in dict.fromkeys(g for g, _, _ in extent.runs):
            ranges = [(lo, hi) for g, lo, hi in extent.runs if g == group]
            hyper = self._groups[group]
            update = Update(
                [values["master"][lo:hi] for lo, hi in ranges],
                [values["gradient"][lo:hi] for lo, hi in ranges],
                {k: [values[k][lo:hi] for lo, hi in ranges] for k in bucket.formats},
                [values["parameter"][lo:hi] if copies else None for lo, hi in ranges],
                [bucket.key + extent.lo + lo for lo, _ in ranges],
            )
            self._rules[hyper.rule].update(
                update, step=step, lr=lr * hyper.lr_scale, weight_decay=hyper.weight_decay, scale=scales[extent.place]
            )
        if extent.place.type != "cpu":
            torch.accelerator.synchronize(extent.place)
        slot.write_back()
        return None if slot.writing else slot.finish()
