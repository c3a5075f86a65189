"""What the state engine can carry out. The core check compares every plan with it, so no plug-in needs to know."""

from __future__ import annotations

from partita.plan.plan import DATA_AXES

CAPABILITIES: dict[str, frozenset[str]] = {
    "axes": frozenset({*DATA_AXES, "pipeline", "tensor", "context", "expert"}),  # layout axes that may be larger than one
    "placement_axes": frozenset(DATA_AXES),  # axes over which states can be cut
    "placements": frozenset({"narrower"}),  # weights or gradients cut over fewer ranks than the optimizer
    "tiers": frozenset({"accelerator", "host", "file"}),  # of parameters, gradients, optimizer
    "activation_tiers": frozenset({"accelerator", "host"}),
    "state_dtypes": frozenset({"float32"}),  # master weights, gradient accumulation
    "optimizer_dtypes": frozenset({"float32", "bfloat16"}),
    "wire_formats": frozenset({"native", "bfloat16", "float16"}),  # gradient reduction
    "gather_formats": frozenset({"native"}),
    "dispatch_formats": frozenset({"native", "bfloat16", "int8", "fp8"}),  # rows to experts, which the expert layers pack
    "algorithms": frozenset({"flat"}),
    "activations": frozenset({"keep", "full", "selective", "operators"}),
}
