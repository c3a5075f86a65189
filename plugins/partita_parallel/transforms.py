"""What is done to a model on meta, where an axis asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.plan.plan import Plan
from partita.plugin.markers import hookimpl
from partita.plugin.types import Transform

if TYPE_CHECKING:
    from torch import nn


@hookimpl
def partita_transforms(plan: Plan) -> list[Transform]:
    """Takes out other stages where there is a pipeline; cuts matrices where there is a tensor axis, and samples where there is a context axis."""
    found = []
    if plan.layout.pipeline > 1:
        found.append(Transform("stage_split", _split_stages))
    if plan.layout.tensor > 1:
        found.append(Transform("tensor_parallel", _tensor_parallel))
    if plan.layout.context > 1:
        found.append(Transform("context_parallel", _context_parallel, after=("stage_split",), before=("adapter",)))
    return found


# torch is imported only where something runs


def _split_stages(model: nn.Module, run: Any) -> nn.Module:
    from partita_parallel.pipeline_split import split

    return split(model, run.plan, run.mesh.coordinates["pipeline"])


def _tensor_parallel(model: nn.Module, run: Any) -> nn.Module:
    from partita_parallel.tensor import tensor_parallel

    return tensor_parallel(model, run)


def _context_parallel(model: nn.Module, run: Any) -> nn.Module:
    from partita_parallel.context import context_parallel

    return context_parallel(model, run)
