"""Config node `compression`: what travels on the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CompressionConfig:
    """A wire format for each purpose: native (as precision says), bfloat16, float16, int8, onebit."""

    # gradients, when they are reduced; sums are made in float32 all the same
    gradient_reduce: str = "native"
    # weights, when they are gathered (only where they are cut)
    parameter_gather: str = "native"
