"""Config node `compression`: what travels on the wire, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CompressionConfig:
    """A wire format for each purpose; `native` is the dtype that precision says. auto (both formats, and `algorithm`): the planner chooses
    from the speed of the links."""

    # gradients, when they are reduced: native, bfloat16, float16, int8, int4, fp8, onebit, topk, powersgd; sums are made in float32 all the same
    gradient_reduce: str = "native"
    # weights, when they are gathered: native, bfloat16, float16, int8, int4, fp8 (ZeRO++, Wang et al. 2023, section 3.1). Where zero leaves them
    # whole, or cuts them over fewer ranks than the optimizer, exact ones are kept apart: 4 bytes for each weight of a rank's shard
    parameter_gather: str = "native"
    # rows of tokens on their way to experts and back, and their gradients: native, bfloat16, int8, fp8 (8 bits with a scale for each row)
    expert_dispatch: str = "native"
    # activations between the stages of a pipeline: native only
    pipeline_activations: str = "native"
    # powersgd: columns of the thin matrices; bytes grow with it (Vogels et al. 2019 use 1 to 4)
    rank: int = 4
    # topk: share of the elements that is sent (Lin et al. 2018 use 0.001 to 0.01)
    density: float = 0.015625
    # keep what packing loses and send it with the next message (Seide et al. 2014); null: where the format needs it (onebit, topk, powersgd).
    # Costs 4 bytes a parameter on each rank (and 4 more for the part it sums, where all ranks need the sum)
    error_feedback: bool | None = None
    # share of the last error that stays in the next one, as an average (LoCo, Xie et al. 2024, uses 0.8 and less); 0: the error is what was lost
    error_average: float = 0.0
    # updates after which errors are forgotten (LoCo: 512); 0: never
    error_reset: int = 0
    # nearest, or stochastic: gradients in int8 and int4 are rounded up or down at random, with the right mean
    rounding: str = "nearest"
    # share of train.steps during which gradients travel natively; 1-bit Adam (Tang et al. 2021, section 3.3) advises 0.15 to 0.25
    warmup: float = 0.0
    # flat, or hierarchical: inside each node first, then between nodes; the format is used between nodes only
    algorithm: str = "flat"
    # all, or slow: leave groups inside one node native (hybrid sharding then compresses between its replicas only)
    levels: str = "all"
    # ranks of a node; null: as the cluster says (cluster.devices_per_node)
    node_ranks: int | None = None


@dataclass
class LocalConfig:
    """Groups of ranks (`parallel.replicate` of them) that train for themselves and meet every few updates."""

    every: int = 1  # updates between meetings; 1: none trains for itself
    # average (local SGD, Stich 2019), or diloco: the average way is a gradient of Nesterov's method (Douillard et al. 2023)
    method: str = "average"
    lr: float = 0.7  # diloco: of that method
    momentum: float = 0.9  # diloco: of that method
    format: str = "native"  # of what the groups say to each other: native, int8, int4, fp8, onebit; with error feedback
