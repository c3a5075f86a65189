"""PowerSGD (Vogels et al. 2019, algorithms 1 and 2): gradients of matrices as products of two thin ones, with error feedback.

For each matrix M = gradient + error: P = M Q is summed and made orthonormal, Q = M' P is summed, and P Q' stands for the sum of all M. The
next Q begins where this one ends. Error: what P and this rank's own Q don't tell of its M. Sums are native, in float32.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from partita.runtime.collectives import Collectives, Then
from partita.runtime.mesh import Group
from partita.runtime.transport import Work
from partita.state.layout import BucketLayout, Segment

WORTH = 2  # least factor by which a matrix must shrink


@dataclass(frozen=True)
class Matrix:
    """A tensor of the bucket as [rows, columns], and where its thin ones begin in the two messages."""

    segment: Segment
    rows: int
    columns: int
    left: int
    right: int


class LowRank:
    """The sums of one bucket over one group. rank: columns of the thin matrices.

    error: float32 [padded], of the whole bucket. right: the thin matrices Q, the same on all ranks.
    """

    def __init__(self, bucket: BucketLayout, group: Group, rank: int, base: Collectives, device: torch.device) -> None:
        self.bucket, self.group, self.rank, self.base = bucket, group, rank, base
        self.matrices: list[Matrix] = []
        self.others: list[Segment] = []
        left = right = 0
        for s in bucket.segments:
            rows = s.shape[0] if s.shape else 1
            columns = math.prod(s.shape[1:])
            if len(s.shape) < 2 or rows * columns < WORTH * rank * (rows + columns):
                self.others.append(s)
                continue
            self.matrices.append(Matrix(s, rows, columns, left, right))
            left, right = left + rows * rank, right + columns * rank
        self._left = left
        self.error = torch.zeros(bucket.padded, dtype=torch.float32, device=device)
        self.right = torch.empty(right, dtype=torch.float32, device=device)
        for m in self.matrices:
            draw = torch.Generator().manual_seed(zlib.crc32(m.segment.name.encode()))
            self.q(m).copy_(torch.randn(m.columns, rank, generator=draw))

    def q(self, m: Matrix) -> torch.Tensor:
        """The right thin matrix [columns, rank]."""
        return self.right[m.right : m.right + m.columns * self.rank].view(m.columns, self.rank)

    def _p(self, m: Matrix, left: torch.Tensor) -> torch.Tensor:
        return left[m.left : m.left + m.rows * self.rank].view(m.rows, self.rank)

    def _of(self, m: Matrix, whole: torch.Tensor) -> torch.Tensor:
        return whole[m.segment.offset : m.segment.offset + m.segment.numel].view(m.rows, m.columns)

    def sum(self, gradient: torch.Tensor, total: torch.Tensor) -> Work:
        """total [padded], float32: about the sum over the group of `gradient` [padded]. The two may be one tensor."""
        message = self.error.new_empty(self._left + sum(s.numel for s in self.others))
        at = self._left
        for m in self.matrices:
            meant = self._of(m, self.error).add_(self._of(m, gradient))
            torch.mm(meant, self.q(m), out=self._p(m, message))
        for s in self.others:
            message[at : at + s.numel].copy_(gradient[s.offset : s.offset + s.numel])
            at += s.numel
        first = self.base.all_reduce(message, self.group)
        return Then([first], lambda: self._second(message, total))

    def _second(self, message: torch.Tensor, total: torch.Tensor) -> None:
        for lo, hi in self.bucket.gaps():
            total[lo:hi] = 0
        at = self._left
        for s in self.others:
            total[s.offset : s.offset + s.numel].copy_(message[at : at + s.numel])
            at += s.numel
        for m in self.matrices:
            p, meant = self._p(m, message), self._of(m, self.error)
            p.copy_(torch.linalg.qr(p).Q)
            torch.mm(meant.T, p, out=self.q(m))
            meant.addmm_(p, self.q(m).T, alpha=-1)
        self.base.all_reduce(self.right, self.group).wait()
        for m in self.matrices:
            torch.mm(self._p(m, message), self.q(m).T, out=self._of(m, total))
