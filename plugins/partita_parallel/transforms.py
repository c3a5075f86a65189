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
    """Cuts the matrices where there is a tensor axis."""
    return [Transform("tensor_parallel", _tensor_parallel)] if plan.layout.tensor > 1 else []


def _tensor_parallel(model: nn.Module, run: Any) -> nn.Module:
    from partita_parallel.tensor import tensor_parallel  # torch is imported only where something runs

    return tensor_parallel(model, run)
