"""Config node `offload`: where each state lives between uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OffloadConfig:
    """A place for each state: none (stays where compute runs), host (memory of the node), file (a folder), auto (the planner chooses)."""

    # master weights and moments (Ren et al. 2021, ZeRO-Offload, section 3)
    optimizer: str = "none"
    # stored weights; they must be cut, so that they are released between uses (Rajbhandari et al. 2021, ZeRO-Infinity, section 5)
    parameters: str = "none"
    # gradients between reduction and update
    gradients: str = "none"
    # what units keep for backward
    activations: str = "none"
    # folder of the file tier; needed exactly where a state goes to `file`
    path: str | None = None
    # share of each offloaded state that goes there, 0 to 1; the rest stays (ZeRO-Offload++ "partial offload")
    fraction: float = 1.0
