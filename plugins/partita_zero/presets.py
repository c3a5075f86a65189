"""The table of presets: the one place where stages have names. A row says which mesh axes cut each state."""

from __future__ import annotations

from partita.plan.plan import Placement

WHOLE: tuple[str, ...] = ()
IN_GROUP = ("shard",)
EVERYWHERE = ("replicate", "shard")

# name: (parameters, gradients, optimizer)
PRESETS: dict[str, Placement] = {
    "ddp": Placement(WHOLE, WHOLE, WHOLE),
    # Rajbhandari et al. 2020, ZeRO: P_os, P_os+g, P_os+g+p
    "zero1": Placement(WHOLE, WHOLE, EVERYWHERE),
    "zero2": Placement(WHOLE, EVERYWHERE, EVERYWHERE),
    "zero3": Placement(EVERYWHERE, EVERYWHERE, EVERYWHERE),
    # Zhao et al. 2023, FSDP hybrid sharding; Zhang et al. 2022, MiCS: cut in a group, whole groups replicated
    "hsdp": Placement(IN_GROUP, IN_GROUP, IN_GROUP),
    # Wang et al. 2023, ZeRO++ hpZ: weights stay within a node, all else is cut over every data rank
    "hpz": Placement(IN_GROUP, EVERYWHERE, EVERYWHERE),
    # Megatron-FSDP: only the optimizer is cut wider than the weights
    "hfsdp": Placement(IN_GROUP, IN_GROUP, EVERYWHERE),
}

# zero.stage is an index into these
STAGES = ("ddp", "zero1", "zero2", "zero3")
