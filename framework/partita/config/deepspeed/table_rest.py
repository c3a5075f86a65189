"""Rules for parallelism, compilation, activations, checkpoints, data, and for what changes the model."""

from __future__ import annotations

from partita.config.deepspeed.rules import (
    Cases,
    Deny,
    Drop,
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
    size,
    text,
    under,
    words,
)
from partita.config.deepspeed.table_root import dtype

_FULL = Take("recompute.policy", lambda _: "full", note="blocks of the model keep their inputs and are computed again")
_HOST = Take("offload.activations", lambda _: "host")


def _default(kind, value, why: str) -> Rule:  # type: ignore[no-untyped-def]
    """A key that has one value here, which is also DeepSpeed's default."""
    return Rule(kind, Deny(why, "leave it out", unless=(value, None)), auto="the model's own")


PARALLEL = Table(
    sections={
        "tensor_parallel": Section(),
        "tensor_parallel.tensor_parallel": Section(),
        "expert_parallel": Section("enabled"),
        "pipeline": Section(),
        "compile": Section(),
    },
    rules={
        **under("tensor_parallel", {
            "autotp_size": Rule(size, Take("parallel.tensor", lambda n: max(n, 1)), auto="parallel.tensor"),
            "dtype": Rule(dtype, Drop("the compute dtype is precision's affair")),
            "tp_overlap_comm": Rule(boolean, Drop("it changes no result")),
            "preset_model": Rule(text, Drop("the model brings its own tensor plan")),
            "injection_policy_tuple": Rule(anything, Deny("modules are not replaced", "leave it out", unless=(None,))),
            "keep_module_on_host": Rule(boolean, Drop("a model is built without memory and filled shard by shard")),
            "replace_with_kernel_inject": Rule(boolean, Drop("kernels are chosen by their dispatch")),
            "partition_config": Rule(anything, Deny("shapes of shards follow from the model's tensor plan", "leave it out",
                                                    unless=(None, {}))),
            "tensor_parallel.tp_size": Rule(count, Take("parallel.tensor")),
            "tensor_parallel.tp_grain_size": Rule(count, Drop("heads and columns are cut evenly")),
            **{f"tensor_parallel.{k}": Rule(anything, Deny("process groups come from the mesh", "leave it out", unless=(None,)))
               for k in ("mpu", "tp_group")},
        }),
        **under("expert_parallel", {
            "enabled": Rule(boolean, Drop("autoep_size says how many ranks share the experts")),
            "autoep_size": Rule(count, Take("parallel.expert")),
            "expert_tensor_parallel_size": _default(count, 1, "experts are not cut over the tensor axis by themselves"),
            **dropped({anything: ["preset_model", "moe_layer_pattern", "router_pattern", "expert_pattern", "expert_w1", "expert_w2",
                                  "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern",
                                  "shared_experts_gate_pattern"]}, "the model says which of its modules are experts"),
            **dropped({boolean: ["use_grouped_mm", "disable_triton_grouped_mm", "validate_folding_routing"]},
                      "kernels are chosen by their dispatch"),
            **{k: _default(anything, v, "routing is the model's own") for k, v in {
                "combine_impl": "auto", "score_func": "auto", "score_apply": "auto", "route_norm": None, "route_scale": 1.0,
                "top_k": "auto", "routed_scaling_factor": "auto", "num_expert_groups": None, "num_limited_groups": None,
                "load_balance_coeff": None}.items()},
        }),
        **under("pipeline", {
            "stages": Rule(count, Take("parallel.pipeline"), auto="parallel.pipeline"),
            "partition": Rule(text, Drop("stages are cut so that they cost the same")),
            "seed_layers": Rule(boolean, Drop("weights depend on the seed and their names, not on the stage")),
            "activation_checkpoint_interval": Rule(size, Cases({0: Drop("off")}, _FULL)),
            **dropped({boolean: ["pipe_partitioned", "grad_partitioned", "use_reentrant"]}, "it changes no result"),
        }),
        **under("compile", {
            "deepcompile": Rule(boolean, Drop("DeepCompile moves gathers and reductions so that they overlap; the engine does that")),
            "disable": Rule(boolean, Drop("nothing is compiled")),
            "enabled": Rule(boolean, Deny("a compiler of the model is not part of this version", "leave it out", unless=(False,))),
            "backend": Rule(text, Drop("nothing is compiled")),
            "kwargs": Rule(anything, Drop("nothing is compiled")),
            "passes": Rule(anything, Deny("passes of DeepCompile have no counterpart", "leave it out; zero.stage, parallel.context "
                                          "and parallel.tensor choose what they do", unless=(None, []))),
            "offload_activation": Rule(boolean, Cases({True: _HOST}, Drop("off"))),
            "offload_opt_states": Rule(boolean, Cases({True: Take("offload.optimizer", lambda _: "host")}, Drop("off"))),
            "offload_parameters": Rule(boolean, Cases({True: Take("offload.parameters", lambda _: "host")}, Drop("off"))),
            **dropped({size: ["free_activation_threshold"],
                       boolean: ["free_activation", "offload_activation_pin_memory", "double_buffer", "symmetric_memory", "debug_log",
                                 "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather",
                                 "keep_int_input_tensors", "keep_all_input_tensors"]}, "a setting of DeepCompile"),
        }),
    },
    aliases={
        "tensor_parallel.tp": "tensor_parallel.tensor_parallel",
        "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
    },
)  # fmt: skip

ACTIVATIONS = Table(
    sections={"activation_checkpointing": Section()},
    rules=under("activation_checkpointing", {
        "partition_activations": Rule(boolean, Cases({True: _FULL}, Drop("recompute.policy says what is kept"))),
        "number_checkpoints": Rule(count, _FULL),
        "cpu_checkpointing": Rule(boolean, Cases({True: _HOST}, Drop("what is kept stays where it is"))),
        **dropped({boolean: ["contiguous_memory_optimization", "synchronize_checkpoint_boundary"]}, "it changes no result"),
        "profile": Rule(boolean, Drop("metrics.jsonl has the seconds of every step")),
    }),
)  # fmt: skip

_SAVING = "a save is written in the background, shards of all ranks side by side, and counts only when it is complete"

CHECKPOINTS = Table(
    sections={
        "checkpoint": Section(),
        "checkpoint.parallel_write": Section(),
        "checkpoint.writer": Section(open="a setting of DeepSpeed's writer: " + _SAVING),
        "nebula": Section("enabled", open="of a service that is off"),
        "datastates_ckpt": Section(open=_SAVING),
        "elasticity": Section("enabled", open="the section is switched off"),
    },
    rules={
        "checkpoint.tag_validation": Rule(words("Ignore", "Warn", "Fail"), Drop("a checkpoint is named after its step")),
        "checkpoint.load_universal": Rule(boolean, Drop("every checkpoint loads in every layout")),
        "checkpoint.use_node_local_storage": Rule(boolean, Deny(
            "all shards of a checkpoint lie in one folder", "let run.dir be on a disk that all nodes share", unless=(False,))),
        "checkpoint.parallel_write.pipeline_stage": Rule(boolean, Drop(_SAVING)),
        "checkpoint.checkpoint_serialization": Rule(boolean, Drop("shards are safetensors")),
        "nebula.enabled": Rule(boolean, Deny("it is a service of Azure", "leave it out: " + _SAVING, unless=(False,))),
        "datastates_ckpt.host_cache_size": Rule(number, Drop(_SAVING)),
        "elasticity.enabled": Rule(boolean, Deny(
            "the number of ranks is fixed for a run", "leave it out: a run resumes on another number of ranks with the same "
            "train_batch_size", unless=(False,))),
    },
)  # fmt: skip

_CURRICULUM = "the order of the data depends on seed and step only; there is no curriculum"
_SMALLER = "a model is not pruned or quantised while it trains"
_OFF: tuple[object, ...] = ({}, None)


def _off(value: object) -> bool:
    """Whether a nested block switches nothing on."""
    if isinstance(value, dict):
        return all(
            _off(v) if isinstance(v, dict) else not (k == "enabled" and v not in (False, "false", 0)) for k, v in value.items()
        )
    return value is None


def _whole(why: str, remedy: str) -> Rule:
    """A block that is taken or left as a whole, whatever stands inside."""
    return Rule(lambda value: None if _off(value) else value, Deny(why, remedy, unless=(None,)), auto="off")


MODEL = Table(
    sections={
        "curriculum_learning": Section("enabled", open="of a curriculum that is off", needed=True),
        "progressive_layer_drop": Section("enabled", needed=True),
        "hybrid_engine": Section("enabled"),
        "sparse_attention": Section(open="of a pattern that is not used"),
    },
    rules={
        "data_efficiency": _whole(_CURRICULUM, 'leave it out, or write "enabled": false'),
        "curriculum_learning.enabled": Rule(boolean, Deny(_CURRICULUM, 'leave it out, or write "enabled": false', unless=(False,))),
        "progressive_layer_drop.enabled": Rule(boolean, Deny("layers are not skipped", "leave it out", unless=(False,))),
        **under("progressive_layer_drop", dropped({number: ["theta", "gamma"]}, "of a schedule that is off")),
        "quantize_training": _whole("quantisation while training (MoQ) is gone in DeepSpeed too", "leave it out"),
        "eigenvalue": _whole("it served MoQ, which is gone in DeepSpeed too", "leave it out"),
        "compression_training": _whole(_SMALLER, "leave it out, or switch all of its parts off"),
        "weight_quantization": Rule(anything, Deny("it is for inference", "leave it out", unless=_OFF)),
        "hybrid_engine.enabled": Rule(boolean, Deny(
            "no inference engine runs inside the training loop", "leave it out: partita.prepare drives the actor and the critic",
            unless=(False,))),
        **under("hybrid_engine", dropped({integer: ["max_out_tokens", "inference_tp_size", "tp_gather_partition_size"],
                                          boolean: ["release_inference_cache", "pin_parameters", "enable_cuda_graph"]},
                                         "of an engine that is off")),
        "sparse_attention.mode": Rule(words("dense", "fixed", "variable", "bigbird", "bslongformer"), Deny(
            "attention is dense; DeepSpeed has removed its sparse kernels too", "leave it out", unless=("dense",))),
    },
)  # fmt: skip
