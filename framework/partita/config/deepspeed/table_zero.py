"""Rules for the section zero_optimization, and for file I/O."""

from __future__ import annotations

from partita.config.deepspeed.rules import (
    Cases,
    Deny,
    Drop,
    Later,
    Rule,
    Section,
    Table,
    Take,
    anything,
    boolean,
    count,
    dropped,
    integer,
    number,
    share,
    size,
    stage,
    text,
    under,
    words,
)

_BUCKETS = "a message is one unit (a block of the model), so there is no bucket size to choose"
_OVERLAP = "gathers and reductions always overlap with compute; no result depends on it"
_UNITS = "weights are gathered unit by unit, zero.prefetch ahead; zero.max_gathered bounds them"
_ANY_LAYOUT = "every checkpoint loads in every layout"
_TIER = "the tier sizes its buffers itself"

_ZERO: dict[str, Rule] = {
    "stage": Rule(stage, Later()),
    **dropped({boolean: ["contiguous_gradients"]}, "gradients are views of one flat buffer"),
    **dropped(
        {boolean: ["reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions", "round_robin_gradients"]},
        "states that are cut are reduce-scattered and all-gathered, others all-reduced",
    ),
    **dropped({size: ["reduce_bucket_size", "allgather_bucket_size"]}, _BUCKETS),
    "overlap_comm": Rule(boolean, Drop(_OVERLAP), auto=_OVERLAP),
    "load_from_fp32_weights": Rule(boolean, Drop("master weights begin with the values of the file, in float32")),
    "elastic_checkpoint": Rule(boolean, Drop(_ANY_LAYOUT)),
    "sub_group_size": Rule(count, Drop("the update is one fused pass over the shard"), auto="the update is one fused pass"),
    "ignore_unused_parameters": Rule(boolean, Drop("a parameter without gradient counts as zero")),
    "legacy_stage1": Rule(boolean, Deny("that code is gone in DeepSpeed too", "leave it out", unless=(False,))),
    **dropped(
        {
            size: [
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "model_persistence_threshold",
                "max_live_parameters",
                "max_reuse_distance",
                "module_granularity_threshold",
            ]
        },
        _UNITS,
    ),
    **dropped({boolean: ["use_all_reduce_for_fetch_params", "allgather_sequential"]}, _UNITS),
    "gather_16bit_weights_on_model_save": Rule(boolean, Drop("`partita export RUN FOLDER` writes whole weights of any checkpoint"),
                                               auto="`partita export` writes whole weights of any checkpoint"),
    **dropped({boolean: ["memory_efficient_linear", "override_module_apply"]}, "nothing of the model's code is replaced"),
    "pipeline_loading_checkpoint": Rule(boolean, Drop("a rank reads just the bytes that it needs")),
    "zero_hpz_partition_size": Rule(count, Later()),
    "zero_quantized_weights": Rule(
        boolean, Cases({True: Take("compression.parameter_gather", lambda _: "int8")}, Drop("off"))),
    "zero_quantized_nontrainable_weights": Rule(
        boolean, Cases({True: Take("compression.parameter_gather", lambda _: "int8")}, Drop("off"))),
    "zero_quantized_gradients": Rule(
        boolean, Cases({True: Take("compression.gradient_reduce", lambda _: "int8")}, Drop("off"))),
    "zeropp_loco_param": Rule(anything, Deny("error feedback of quantised gradients has no settings here", "leave it out",
                                             unless=(None,))),
    "mics_shard_size": Rule(integer, Later()),
    "mics_hierarchical_params_gather": Rule(boolean, Drop("a gather over several nodes takes the links as the collective finds them")),
    **dropped({boolean: ["log_trace_cache_warnings", "enable_sanity_checks"]}, "the order of gathers is fixed, nothing is traced"),
    "save_muon_momentum_buffer_in_memory": Rule(boolean, Drop("all states of an optimizer live on its tier")),
    "cpu_offload": Rule(boolean, Cases({True: Take("offload.optimizer", lambda _: "host")}, Drop("off"))),
    "cpu_offload_param": Rule(boolean, Cases({True: Take("offload.parameters", lambda _: "host")}, Drop("off"))),
    **dropped({boolean: ["cpu_offload_use_pin_memory"]}, "the host tier is pinned where there is an accelerator"),
    "zenflow": Rule(anything, Deny("stale updates of the less important gradients are not what this engine does",
                                   "leave it out; offload.optimizer=host overlaps the host's update without staleness",
                                   unless=(None,))),
}  # fmt: skip

_PLACES = {"none": "none", "cpu": "host", "nvme": "file"}
_DEVICE = words("none", "cpu", "nvme")
_OPTIMIZER, _PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def _offload(state: str, prefix: str) -> dict[str, Rule]:
    return under(
        prefix,
        {
            "device": Rule(_DEVICE, Take(f"offload.{state}", _PLACES), auto="none"),
            "nvme_path": Rule(text, Take("offload.path"), needs=(f"{prefix}.device", ("nvme",), "no state of it goes to files")),
            **dropped({count: ["buffer_count"], size: ["buffer_size", "max_in_cpu"]}, _TIER),
            **dropped({boolean: ["pin_memory"]}, "the host tier is pinned where there is an accelerator"),
        },
    )


ZERO = Table(
    sections={
        "zero_optimization": Section(),
        _PARAM: Section(),
        _OPTIMIZER: Section(),
        "zero_optimization.leaf_module": Section(),
        "aio": Section(),
    },
    rules={
        **under("zero_optimization", _ZERO),
        **_offload("parameters", _PARAM),
        **_offload("optimizer", _OPTIMIZER),
        **under(
            _OPTIMIZER,
            {
                **dropped({boolean: ["pipeline_read", "pipeline_write", "pipeline", "fast_init"]},
                          "reading, updating and writing always overlap"),
                "ratio": Rule(share, Take("offload.fraction"), needs=(f"{_OPTIMIZER}.device", ("cpu", "nvme"), "nothing is offloaded")),
                "super_offload": Rule(boolean, Drop("the host's update overlaps with what follows"), auto="off"),
                "cpuadam_cores_perc": Rule(number, Drop("launch.threads says how many threads a rank computes with")),
            },
        ),
        **under("zero_optimization.leaf_module",
                dropped({anything: ["classes", "names", "name_suffixes"]}, "a block is gathered as a whole anyway")),
        **under("aio", {
            **dropped({size: ["block_size", "queue_depth", "intra_op_parallelism"], boolean: ["single_submit", "overlap_events"]},
                      "the file tier chooses its requests itself"),
            "thread_count": Rule(size, Drop("DeepSpeed does not read it either; the file tier chooses its requests itself")),
            "use_gds": Rule(boolean, Deny("GPUDirect Storage is not used", "leave it out", unless=(False,))),
        }),
    },
    aliases={
        **{f"zero_optimization.stage3_{key}": f"zero_optimization.{key}" for key in (
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
            "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
            "use_all_reduce_for_fetch_params", "allgather_sequential")},
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.gather_fp16_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    },
    strangers={
        "zero_optimization.grad_hooks": "DeepSpeed's documentation has it, its code refuses it",
        "zero_optimization.find_unused_parameters": "DeepSpeed calls it ignore_unused_parameters, and Partita needs neither",
        "zero_optimization.cpu_offload_params": "it was cpu_offload_param; write offload_param: {device: cpu}",
        "zero_optimization.memory_efficient": "write memory_efficient_linear, or leave it out",
    },
)  # fmt: skip
