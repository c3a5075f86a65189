"""Config node `parallel`: how many ranks lie along each axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ParallelConfig:
    """Degrees are counts of ranks. data = replicate x shard; all others times data make the world."""

    # ranks that see different samples; auto: all ranks / (pipeline x context x tensor), without accelerators two
    data: int | str = "auto"
    # groups of ranks that hold the same shards; auto: data / shard
    replicate: int | str = "auto"
    # ranks that states can be cut over; auto: zero.shard_size, else data / replicate
    shard: int | str = "auto"
    # ranks that share the tokens of one sample (Liu et al. 2023, ring attention)
    context: int | str = 1
    # ranks that share each matrix (Shoeybi et al. 2019, section 3); inside a node where possible
    tensor: int | str = 1
    # cut activations between matrices by tokens, too (Korthikanti et al. 2022, section 4.2.2); auto: the planner's choice
    sequence_parallel: bool | str = False
    # a head of keys and values may be shared by several tensor ranks, where there are fewer heads than ranks
    replicate_kv: bool = False
    # tensor parallel styles (partita.plan.styles) of modules by path, "blocks.*.mlp.up=colwise"; they go before the model's own
    styles: list[str] = field(default_factory=list)
    # how attention sees the tokens of other context ranks: ring (keys and values go round), ulysses (heads are exchanged)
    context_method: str = "ring"
    # stages that the units are cut into (Huang et al. 2019)
    pipeline: int | str = 1
    # ranks that share the experts; folds over the data axes, so it adds no ranks (Lepikhin et al. 2020)
    expert: int | str = 1
    # order of forward and backward over stages: auto (1f1b where there are stages), gpipe, 1f1b, interleaved, interleaved_zb, zbv,
    # dualpipev (docs/strategies/pipeline.md)
    schedule: str = "auto"
    # stages of each rank, where the schedule leaves a choice (Narayanan et al. 2021, section 2.2); auto: 2
    stages_per_rank: int | str = "auto"
    # how blocks are shared out: cost (equal time, ends included, then least memory) or count
    stage_cut: str = "cost"
    # blocks of each stage, by hand; empty: as stage_cut says
    stages: list[int] = field(default_factory=list)
    # micro-batches between reductions of gradients that are cut (zero.stage 2 and 3): more send less and keep whole gradients
    reduce_every: int = 1
    # how long the cut weights of a stage stay whole: action (one forward or backward, block by block), run (until the rank turns to
    # another stage), step; auto: run
    gather: str = "auto"
    # passes of a rank for one update; auto: train.global_batch / (data x train.micro_batch)
    microbatches: int | str = "auto"
    # what zero, offload and recompute come to where nobody chose them: default, or auto (the planner's choice)
    others: str = "default"
    # plans that are measured for some steps before one of them is taken, where the planner chooses; 0: its prediction decides
    trials: int = 0
