"""Names that the node `compression` takes."""

from __future__ import annotations

CASTS = ("native", "bfloat16", "float16")  # the built-in collectives do these
SIZES = {"int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256, "fp8": 1 + 4 / 256, "onebit": 1 / 8 + 4 / 1024}  # bytes of an element
BLOCKS = (*SIZES, "topk", "powersgd")
FORMATS = {
    "gradient_reduce": (*CASTS, *BLOCKS),
    "parameter_gather": (*CASTS, "int8", "int4", "fp8"),
    "expert_dispatch": ("native", "bfloat16", "int8", "fp8"),
}
INTEGERS = ("int8", "int4")
ROUNDINGS = ("nearest", "stochastic")
NEEDS_FEEDBACK = ("onebit", "topk", "powersgd")
ALIASES = {"none": "native", "bf16": "bfloat16", "fp16": "float16"}
ALGORITHMS = ("flat", "hierarchical")
LEVELS = ("all", "slow")
RULES = {"onebit_adam": "adam", "zero_one_adam": "adam", "onebit_lamb": "lamb"}  # update rules -> their modules
