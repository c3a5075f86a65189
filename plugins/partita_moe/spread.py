"""Experts whose matrices are cut over the tensor axis (Shoeybi et al. 2019, section 3; with experts: Singh et al. 2023, DeepSpeed-TED).

The ranks of a tensor group make the same choices for the same tokens, and each computes the part of an expert's inner channels that it has:
a term of each answer. Answers are weighed and brought back to their tokens first, as that is linear, so what is summed over the group is as
large as the tokens and not as their `top_k` rows, and doesn't depend on the routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from partita.runtime.functional import Gathering, copy, gather, reduce, reduce_scatter
from partita.runtime.mesh import Group
from partita_kernels import Order, expert_order
from partita_moe.routing import Choice

Tensor = torch.Tensor


class Spread:
    """What the layers of a model do around experts that are cut over `group`.

    sequence: each rank has other tokens, which all ranks get and whose answers each gets back; else all ranks have the same ones.
    """

    def __init__(self, group: Group, sequence: bool) -> None:
        self.group, self.sequence = group, sequence

    @contextmanager
    def wholly(self) -> Iterator[None]:
        """Inside, all ranks have all tokens, as for generation."""
        before, self.sequence = self.sequence, False
        try:
            yield
        finally:
            self.sequence = before

    def enter(self, tokens: Tensor, choice: Choice, order: Order, limited: bool) -> tuple[Tensor, Tensor, Order]:
        """tokens [n, C] -> tokens, gates and order of all that the group computes together. Gradients are summed over the group.

        limited: choices may have been given up (expert -1), by this rank or another.
        """
        if not self.sequence:
            return copy(tokens, self.group), copy(choice.gates, self.group), order
        chosen = Gathering(choice.experts, self.group, 0)
        every, gates = (gather(x, self.group, 0, summed=True) for x in (tokens, choice.gates))
        whole = expert_order(chosen.wait(), len(order.sizes))
        return every, gates, present(whole) if limited else whole

    def leave(self, terms: Tensor) -> Tensor:
        """Each rank's terms of all answers -> this rank's answers."""
        return reduce_scatter(terms, self.group, 0) if self.sequence else reduce(terms, self.group)


def present(order: Order) -> Order:
    """Without the choices that were given up, which come last. Waits for a device."""
    return order._replace(slots=order.slots[: int(order.sizes.sum())])
