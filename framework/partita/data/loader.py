"""What a data rank reads: the micro-batches of each update, and its part of the validation set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.data.packing import Batch, Cutter
from partita.data.prefetch import Prefetch
from partita.data.sampler import Order, share
from partita.errors import CheckpointError, PartitaError
from partita.plan.plan import Schedule


@dataclass(frozen=True)
class Share:
    """Which data rank this is, of how many."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise PartitaError(f"data rank {self.rank} of {self.size} does not exist")


class Data:
    """Training and validation samples of one data rank. Holds no position: everything is a function of seed and step."""

    def __init__(
        self, train: Cutter, validation: Cutter, order: Order, schedule: Schedule, mine: Share, threads: int = 1
    ) -> None:
        self.train, self.validation, self.order = train, validation, order
        self.schedule, self.share, self._threads = schedule, mine, threads
        self.skipped = 0  # updates whose samples are passed over: all from here on come that many earlier
        self._running: list[Prefetch[list[Batch]]] = []
        self._low, self._high = share(schedule.global_batch, mine.rank, mine.size)
        slots = schedule.micro_batch * schedule.micro_batches
        widest = -(-schedule.global_batch // mine.size)
        if slots < widest:
            raise PartitaError(
                f"train.global_batch: {schedule.global_batch} sequences over {mine.size} data ranks are up to {widest} a rank, "
                f"but {schedule.micro_batches} micro-batches of {schedule.micro_batch} hold {slots}\n"
                "    -> raise train.micro_batch"
            )

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples of each split."""
        return {"train": len(self.train), "validation": len(self.validation)}

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens of each split, and of one update."""
        step = self.schedule.global_batch * self.train.sequence
        return {"train": self.train.corpus.tokens.size, "validation": self.validation.corpus.tokens.size, "step": step}

    def epoch(self, step: int) -> float:
        """Epochs of the training set that are used up after update `step`."""
        return (step + self.skipped) * self.schedule.global_batch / len(self.train)

    # -------------------------------------------------------------- training

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches for update `step` (from 1), `micro_batches` of them, all of shape [micro_batch, T].

        Where a rank's share is smaller than its slots, the last rows are empty samples with all labels ignored and number -1.
        """
        if step < 1:
            raise PartitaError(f"updates are counted from 1, not {step}")
        first = (step - 1 + self.skipped) * self.schedule.global_batch + self._low
        count = self._high - self._low
        slots = self.schedule.micro_batch * self.schedule.micro_batches
        indices = _padded(self.order.indices(first, count), slots)
        sample = _padded(np.arange(first, first + count, dtype=np.int64), slots)
        return [self.train.batch(indices[at], sample[at]) for at in _slices(slots, self.schedule.micro_batch)]

    def iterate(self, first_step: int, last_step: int | None = None) -> Prefetch[list[Batch]]:
        """Iterator of (step, micro-batches), prepared by `data.workers` threads. Call its `close`, or use it in a `with`."""
        ahead = Prefetch(self.step, first_step, last_step, self._threads)
        self._running.append(ahead)
        return ahead

    def close(self) -> None:
        """Ends all threads that prepare batches. May be called more than once."""
        while self._running:
            self._running.pop().close()

    # -------------------------------------------------------------- evaluation

    @property
    def has_evaluation(self) -> bool:
        """Whether there is a validation set; the same on every rank."""
        return len(self.validation) > 0

    def evaluation(self, batches: int = 0) -> Iterator[Batch]:
        """This rank's part of the validation set (its first `batches` global batches; 0: all), each sample once over all ranks.

        Every rank gets the same number of batches of shape [micro_batch, T]; what a rank lacks is filled with empty samples.
        Their labels are all ignored, so they enter neither sums nor counts.
        """
        total = len(self.validation)
        if batches:
            total = min(total, batches * self.schedule.global_batch)
        low, high = share(total, self.share.rank, self.share.size)
        size = self.schedule.micro_batch
        widest = -(-total // self.share.size)
        mine = _padded(np.arange(low, high, dtype=np.int64), -(-widest // size) * size)
        for at in _slices(mine.size, size):
            yield self.validation.batch(mine[at], mine[at])

    # -------------------------------------------------------------- resume

    def state(self) -> dict[str, Any]:
        """What the order of samples depends on, besides the step; JSON-able, the same on every rank and for every layout."""
        return {
            "corpus": self.train.corpus.identity,
            "tokenizer": self.train.tokenizer.fingerprint,
            "samples": len(self.train),
            "sequence": self.train.sequence,
            "global_batch": self.schedule.global_batch,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "pack": self.train.pack,
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Compares with the `state` of a checkpoint. Raises CheckpointError where going on would repeat or skip samples."""
        mine = self.state()
        changed = [name for name in mine if saved.get(name) != mine[name]]
        if changed:
            lines = "\n".join(f"    {_KEYS[name]}: {saved.get(name)} when saved, {mine[name]} now" for name in changed)
            raise CheckpointError(
                f"the data differ from those of the checkpoint, so samples would be repeated or left out:\n{lines}\n"
                "    -> restore these values, or train.resume=never in a new run.dir (the number of ranks may change freely)"
            )


_KEYS = {
    "corpus": "data.name or data.path (content of the corpus)",
    "tokenizer": "data.tokenizer",
    "samples": "number of samples",
    "sequence": "data.sequence",
    "global_batch": "train.global_batch",
    "seed": "seed",
    "shuffle": "data.shuffle",
    "pack": "data.pack",
}


def _padded(values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """`values` and -1 up to `size` entries."""
    return np.pad(values, (0, size - values.size), constant_values=-1)


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(at, at + size) for at in range(0, total, size))
