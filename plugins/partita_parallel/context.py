"""The transform `context_parallel`: each rank has some tokens of every sample, and attention sees those of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.models.common import Attend, MakeMask, attend, document_mask
from partita.runtime.functional import Gathering
from partita.runtime.mesh import Group
from partita.train.view import Batch
from partita_parallel.ring import ring_attention, ring_columns
from partita_parallel.ulysses import exchanged, to_tokens, ulysses_columns

Tensor = torch.Tensor
AXIS = ("context",)
OF_TOKENS = ("input_ids", "labels", "positions", "documents")  # of a batch, [B, T]


@dataclass
class Context:
    """What the attentions of one model have in common. active: samples are cut; not so while text is generated."""

    group: Group
    columns: Tensor
    active: bool = True

    def batch(self, batch: Batch) -> Batch:
        """This rank's tokens of each sample, with their places in it."""
        columns = self.columns.to(batch["input_ids"].device)
        out = {name: t[:, columns] if name in OF_TOKENS else t for name, t in batch.items()}
        out.setdefault("positions", columns.expand_as(out["input_ids"]))
        return {**out, "columns": columns}

    @contextmanager
    def wholly(self) -> Iterator[None]:
        """Inside, samples are whole on every rank."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    # ------------------------------------------------------------------ ring

    def ring(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool) -> Tensor:
        """In place of `attend`; mask: of `ring_mask`."""
        return ring_attention(q, k, v, mask, self.group, causal) if self.active else attend(q, k, v, mask, causal)

    def ring_mask(self, documents: Tensor | None, causal: bool) -> Tensor | None:
        """Documents as they are: masks are made of pieces, turn by turn."""
        return documents if self.active else document_mask(documents, causal)

    # ------------------------------------------------------------------ ulysses

    def ulysses(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """In place of `attend`; mask: of `ulysses_mask`."""
        if not self.active:
            return attend(q, k, v, mask, causal)
        return to_tokens(attend(*exchanged(q, k, v, self.group), mask, causal), self.group)

    def ulysses_mask(self, documents: Tensor | None, causal: bool) -> Tensor | None:
        """Of whole sequences."""
        if documents is not None and self.active:
            documents = Gathering(documents, self.group, 1).wait()
        return document_mask(documents, causal)


def spread_attention(model: nn.Module, method: str, tokens: int, group: Group) -> Context:
    """Let the attentions of a model see the tokens of all ranks. tokens: of a whole sample."""
    columns = {"ring": ring_columns, "ulysses": ulysses_columns}[method](tokens, group.rank, group.size)
    context = Context(group, columns)
    see: Attend = context.ring if method == "ring" else context.ulysses
    mask: MakeMask = context.ring_mask if method == "ring" else context.ulysses_mask
    for module in model.modules():
        if getattr(module, "attend", None) is attend:
            module.attend = see  # type: ignore[assignment]
        if getattr(module, "mask", None) is document_mask:
            module.mask = mask  # type: ignore[assignment]
    return context


def context_parallel(model: nn.Module, run: Any) -> nn.Module:
    """See `partita.plugin.types.Transform`."""
    context = spread_attention(model, run.plan.layout.context_method, run.config.data.sequence, run.mesh.group(AXIS))
    run.view.batches.append(context.batch)
    run.view.switches.append(context.wholly)
    return model
