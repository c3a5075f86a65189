"""What ranks keep of the messages of a bucket, for checkpoints: errors of compression, and momentum.

Only the sum over all ranks counts: it is what weights have yet to see. So another number of ranks can go on: each takes over the buffers of
some of the ranks that there were, and adds them up. In the same layout every rank gets back its own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from partita.plan.plan import AXES, GRADIENT_AXES
from partita.runtime.mesh import Mesh
from partita.state.layout import BucketLayout
from partita.state.slices import StateSlice, Term
from partita.state.units import SHARED

ERROR, MOMENTUM = "error", "momentum"
BASIS, SCALE = "basis", "scale"  # the same on all ranks: PowerSGD's thin matrices, the average factor of clipping
SPEED = "speed"  # of DiLoCo: the same in all groups of ranks
MEETING = "meeting"  # weights of the last meeting


@dataclass(frozen=True)
class Kept:
    """A float32 buffer of this rank for parts of a bucket.

    spans: (first element in the bucket, first one in the buffer, count); a buffer may have padding besides. heirs: (row, rows), where this
    buffer takes over what ranks of another layout had: of the ranks that keep one for the same element each has a row of its own;
    None: it begins at nothing there.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    spans: tuple[tuple[int, int, int], ...]
    heirs: tuple[int, int] | None = None


class Finder:
    """The keys of `Ledger` in a checkpoint, by what they hold; shared by all ledgers, so that a load parses them once."""

    def __init__(self) -> None:
        self._stored: Mapping[str, Any] = {}
        self._found: dict[tuple[str, str, str], list[tuple[int, int, int, str]]] = {}

    def find(self, stored: Mapping[str, Any], what: tuple[str, str, str]) -> list[tuple[int, int, int, str]]:
        """(sender, first element, count, key) of all that is stored of a (kind, cut, parameter)."""
        if self._stored is not stored:
            self._stored, self._found = stored, {}
            for key, entry in stored.items():
                words = key.split(".", 7)
                if words[0] == "wire" and len(words) == 8 and words[5].isdigit() and words[6].isdigit():
                    where = (int(words[5]), int(words[6]), entry.shape[0], key)
                    self._found.setdefault((words[2], words[4], words[7]), []).append(where)
        return self._found.get(what, [])


@dataclass
class Ledger:
    """Of one bucket on one rank. layout: a word for all that says who keeps what, equal on all ranks.

    alike: (kind, parameter, 1-D tensor) of what is the same on all ranks.
    """

    mesh: Mesh
    bucket: BucketLayout
    layout: str
    finder: Finder
    kept: list[Kept] = field(default_factory=list)
    alike: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)

    def slices(self) -> list[StateSlice]:
        """All that is kept, parameter by parameter."""
        out = [self._same(*what) for what in self.alike]
        for kept in self.kept:
            out += [self._slice(kept, name, lo, kept.tensor[at : at + n]) for name, lo, at, n in self._ranges(kept)]
        return out

    def _ranges(self, kept: Kept) -> list[tuple[str, int, int, int]]:
        """(parameter, first element of it, first one in the buffer, count)."""
        out = []
        for first, at, count in kept.spans:
            for s in self.bucket.segments:
                lo, hi = max(first, s.offset), min(first + count, s.offset + s.numel)
                if lo < hi:
                    out.append((s.name, lo - s.offset, at + lo - first, hi - lo))
        return out

    def holes(self, kept: Kept) -> list[tuple[int, int]]:
        """Ranges of a buffer that belong to no parameter."""
        out, end = [], 0
        for _, _, at, n in sorted(self._ranges(kept), key=lambda r: r[2]):
            if at > end:
                out.append((end, at))
            end = at + n
        size = kept.tensor.numel()
        return [*out, (end, size)] if end < size else out

    def _slice(self, kept: Kept, parameter: str, lo: int, data: torch.Tensor) -> StateSlice:
        key = self._key(kept.kind, kept.name, lo, parameter)
        shared_with_first = self.bucket.unit.startswith(SHARED) and self.mesh.coordinates["pipeline"] > 0
        heirs = None if shared_with_first else kept.heirs
        heir = Heir(self.finder, (kept.kind, self._cut(), parameter), lo, lo + data.numel(), heirs)
        return StateSlice(key, (data.numel(),), data.dtype, 0, data.numel(), data, optional=True, instead=heir)

    def weights(self, kind: str, tensor: torch.Tensor, first: int, saved: bool) -> list[StateSlice]:
        """Of a buffer for weights from element `first` of the bucket on, which all that have it share: whole tensors to any layout.

        What is not stored begins as the model's weights. saved: by this rank.
        """
        second = self.bucket.unit.startswith(SHARED) and self.mesh.coordinates["pipeline"] > 0
        out = []
        for s in self.bucket.segments:
            lo, hi = max(first, s.offset), min(first + tensor.numel(), s.offset + s.numel)
            for at, to, n in s.part.runs(lo - s.offset, hi - s.offset) if lo < hi else ():
                start, model = at + s.offset - first, partial(_stored, Term(f"model.{s.name}", to, to + n, 0))
                data = tensor[start : start + n]
                fixed = (f"wire.{kind}.{s.name}", s.part.shape, data.dtype, to, to + n, data)
                out.append(StateSlice(*fixed, optional=True, instead=model, saved=saved and not second))
        return out

    def _same(self, kind: str, parameter: str, tensor: torch.Tensor) -> StateSlice:
        key = self._key(kind, "own", 0, parameter)
        anyone = Heir(self.finder, (kind, self._cut(), parameter), 0, tensor.numel(), None)
        return StateSlice(key, (tensor.numel(),), tensor.dtype, 0, tensor.numel(), tensor, optional=True, instead=anyone.first)

    def _key(self, kind: str, name: str, lo: int, parameter: str) -> str:
        return ".".join(("wire", self.layout, kind, name, self._cut(), str(self._sender()), str(lo), parameter))

    def _senders(self) -> tuple[str, ...]:
        return tuple(a for a in AXES if (a in GRADIENT_AXES or a in self.bucket.partial) and a not in self.bucket.axes)

    def _sender(self) -> int:
        """A number of this rank among those whose gradients are summed; copies in other stages of a pipeline have some of their own."""
        ranks = self.mesh.ranks(self._senders())
        stage = self.mesh.coordinates["pipeline"] if self.bucket.unit.startswith(SHARED) else 0
        return stage * len(ranks) + ranks.index(self.mesh.rank)

    def _cut(self) -> str:
        """Where this rank is along axes that cut its tensors, or hold copies of them; parts that are cut elsewhere don't fit together."""
        axes = [a for a in AXES if a not in self._senders() and a != "pipeline" and getattr(self.mesh.layout, a) > 1]
        return "-".join(f"{a}{self.mesh.coordinates[a]}of{getattr(self.mesh.layout, a)}" for a in axes) or "whole"


def _stored(term: Term, stored: Mapping[str, Any]) -> list[Term]:
    return [term] if term.key in stored else []


@dataclass(frozen=True)
class Heir:
    """What a buffer for elements [lo, hi) of a parameter adds up of what ranks of another layout have left."""

    finder: Finder
    what: tuple[str, str, str]
    lo: int
    hi: int
    heirs: tuple[int, int] | None

    def __call__(self, stored: Mapping[str, Any]) -> list[Term] | None:
        """stored: key -> anything with a `shape`."""
        if self.heirs is None:
            return None
        row, rows = self.heirs
        terms = []
        for sender, first, count, key in self.finder.find(stored, self.what):
            lo, hi = max(self.lo, first), min(self.hi, first + count)
            if sender % rows == row and lo < hi:
                terms.append(Term(key, lo - first, hi - first, lo - self.lo))
        return terms

    def first(self, stored: Mapping[str, Any]) -> list[Term]:
        """One of those that are alike, if it has as many elements."""
        found = self.finder.find(stored, self.what)[:1]
        return [Term(key, 0, count, 0) for _, _, count, key in found if count == self.hi]
