"""Config node `moe`: which experts the model has, and who is sent to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MoeConfig:
    """A routing by name, and its numbers. Defaults that are null are those of the routing."""

    # none (dense feed-forward layers, or experts as they are), switch, gshard, mixtral, deepseek, residual, expert_choice; hf: runs the experts that a
    # Hugging Face model has; see docs/strategies/moe.md
    name: str = "none"
    # experts of a layer, over all ranks
    experts: int = 8
    # experts that a token is sent to (expert_choice: on average); null: 1 for switch and residual, 2 for the others
    top_k: int | None = None
    # lets expert_choice route a causal model, though whether a token is taken depends on later ones of its sequence
    look_ahead: bool = False
    # every how many blocks a feed-forward layer becomes experts, from the `every`-th on
    every: int = 1
    # inner width of an expert; null: that of the dense layer
    ffn: int | None = None
    # experts that see every token beside the routed ones (DeepSeekMoE, Dai et al. 2024); null: 1 for deepseek, else 0
    shared: int | None = None
    # groups of experts of which a token may use `group_top_k` (DeepSeek-V3 2024, section 2.1.2); 1: no limit
    groups: int = 1
    group_top_k: int = 1
    # factor on the gates of deepseek (2.5 in DeepSeek-V3 with 256 experts); null: 1
    scale: float | None = None
    # how loads are kept even: sequence, batch, global (auxiliary loss; shares counted over one sequence, one micro-batch, or the whole
    # update before), bias (no loss: Wang et al. 2024), none; null: bias for deepseek, else sequence
    balance: str | None = None
    # weight of the auxiliary loss (Fedus et al. 2022, section 2.2: 1e-2)
    aux_weight: float = 1e-2
    # weight of the squared log-sum-exp of the router's logits (Zoph et al. 2022, section 3.3: 1e-3)
    z_weight: float = 0.0
    # step of the balancing bias, once an update (DeepSeek-V3 2024, section 4.2: 1e-3)
    bias_rate: float = 1e-3
    # most tokens of an expert, as a multiple of the even load (Fedus et al. 2022: 1.0 to 1.25); null: dropless
    capacity: float | None = None
    # with parallel.tensor: whether each rank has whole experts (whole), or their inner channels are cut as those of dense layers are (cut)
    tensor: str = "whole"
    # who keeps a place where there is no room for all: position (first choices first, then earlier tokens: Fedus et al. 2022, section 2.2),
    # probability (the largest gates, whatever the position: what Riquelme et al. 2021, section 2.3, call batch prioritized routing)
    drop: str = "position"
    # half the width of the random numbers around one that the router's input is multiplied by in training (Fedus et al. 2022, section 2.4:
    # 1e-2); they depend on seed, step, sample, position and block only
    jitter: float = 0.0
    # a run's folder or a checkpoint of the dense model as whose feed-forward layers all experts begin (Komatsuzaki et al. 2022)
    upcycle: str | None = None
