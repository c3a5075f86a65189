"""Small files with the keys and oddities of configs found in public repositories, by number: (name of the file, its text)."""

from __future__ import annotations

import json
from typing import Any

Files = dict[str, tuple[str, str]]

_BATCH: dict[str, Any] = {"train_batch_size": 16}
_AUTO_BATCH: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_ADAM = {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}}
_AUTO_ADAM = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
_AUTO_WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
_AUTO_DECAY = {"type": "WarmupDecayLR", "params": {**_AUTO_WARMUP["params"], "total_num_steps": "auto"}}
_AUTO_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_FP16 = {**_AUTO_FP16, "enabled": True}
_CPU = {"device": "cpu", "pin_memory": True}
_NONE = {"device": "none"}
_Z3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_Z2: dict[str, Any] = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
_OFFLOADED = {**_Z3, "offload_optimizer": _CPU, "offload_param": _CPU}
_HF3 = {"fp16": _AUTO_FP16, "bf16": {"enabled": "auto"}, **_AUTO_BATCH, "steps_per_print": 2000, "wall_clock_breakdown": False}
_WATCH = {"steps_per_print": 10, "wall_clock_breakdown": False, "prescale_gradients": False}


def _j(value: dict[str, Any], crlf: bool = False, end: str = "\n", start: str = "") -> tuple[str, str]:
    text = start + json.dumps(value, indent=2) + end
    return "ds_config.json", text.replace("\n", "\r\n") if crlf else text


def _compression(**techniques: Any) -> dict[str, Any]:
    return {
        name: {
            "shared_parameters": {"enabled": True, "schedule_offset": 0},
            "different_groups": {"g1": {"params": params, "modules": ["attention.self", "word_embeddings"]}},
        }
        for name, params in techniques.items()
    }


_TEMPLATE = """{{
  "train_batch_size" : CONFIG_BATCH_SIZE,
  "train_micro_batch_size_per_gpu": CONFIG_MBSIZE,
  "steps_per_print": LOG_INTERVAL,
\t"zero_optimization": {{ "stage": {stage} {more}}},
  "gradient_clipping": 1.0,
  "prescale_gradients": {prescale},
  "fp16": {{ "enabled": CONFIG_FP16_ENABLED, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2 }},
  "bf16": {{ "enabled": CONFIG_BF16_ENABLED }},
  "wall_clock_breakdown" : false
  {last}
}}
"""
_ACCELERATE = """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
{inner}
distributed_type: DEEPSPEED
downcast_bf16: {downcast}
machine_rank: 0
main_training_function: main
{more}
mixed_precision: {precision}
num_machines: 1
num_processes: {processes}
rdzv_backend: static
same_network: true
use_cpu: false
"""


def _accelerate(
    inner: dict[str, str], more: str = "", precision: str = "bf16", processes: int = 2, downcast: str = "'no'"
) -> tuple[str, str]:
    lines = "\n".join(f"  {k}: {v}" for k, v in inner.items())
    return "accelerate.yaml", _ACCELERATE.format(
        inner=lines, more=more, precision=precision, processes=processes, downcast=downcast
    )


_PLAIN3 = {
    "zero_stage": "3",
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": "true",
    "zero3_save_16bit_model": "true",
    "deepspeed_multinode_launcher": "standard",
    "gradient_accumulation_steps": "4",
}

FILES: Files = {
    "001": _j({**_BATCH, **_WATCH, "optimizer": _ADAM, "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10}}, "bf16": {"enabled": True}, "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0},
        "compile": {"deepcompile": True, "double_buffer": True}}),
    "002": _j({**_BATCH, **_WATCH, "fp16": {"enabled": True}, "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
               "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}}}),
    "003": _j({**_BATCH, "tensorboard": {"enabled": True, "output_path": "/tmp", "job_name": "x"}, "optimizer": _ADAM, "fp16": _FP16,
               "quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 12, "target_bits": 8}},
               "eigenvalue": {"enabled": True, "max_iter": 50}}),
    "004": _j({**_BATCH, "zero_optimization": {"stage": 2, "cpu_offload": True, "reduce_bucket_size": 50000000}, "fp16": _FP16,
               "zero_allow_untested_optimizer": True, "gradient_clipping": 1.0}),
    "011": _j({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "optimizer": _ADAM, "steps_per_print": 10}, start=" "),
    "014": _j({**_BATCH, **_WATCH, "fp16": {"enabled": True, "loss_scale": 0}, "optimizer": {"type": "OneBitLamb", "params": {
        "lr": 4e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01, "freeze_step": 1000,
        "cuda_aware": False, "comm_backend_name": "nccl", "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5,
        "factor_threshold": 0.1}}}),
    "015": _j({**_BATCH, **_WATCH, "fp16": {"enabled": True}, "optimizer": {"type": "ZeroOneAdam", "params": {
        "lr": 4e-4, "bias_correction": False, "var_freeze_step": 12500, "var_update_scaler": 16, "local_step_scaler": 32678,
        "local_step_clipper": 16, "cuda_aware": False, "comm_backend_name": "nccl"}}}, end=""),
    "017": _j({**_BATCH, "steps_per_print": 10, "optimizer": {"type": "Adam", "params": {
        "lr": 3e-5, "max_grad_norm": 1.0, "bias_correction": True}}, "gradient_clipping": 1.0, "fp16": {"enabled": False}},
        crlf=True, end=""),
    "021": ("ds_config.json", _TEMPLATE.format(stage=0, more="", prescale="PRESCALE_GRAD", last=""", "data_efficiency": {"enabled": true,
        "seed": DATA_EFFICIENCY_SEED, "data_sampling": {"enabled": true, "curriculum_learning": {"enabled": CONFIG_CL_ENABLED}}}""")),
    "022": _j({**_BATCH, **_WATCH, "zero_optimization": {"stage": 0}, "fp16": {"enabled": False}, "compression_training": _compression(
        weight_quantization={"start_bits": 1, "target_bits": 1, "quantization_period": 0}, activation_quantization={"bits": 8},
        sparse_pruning={"dense_ratio": 0.5}, row_pruning={"dense_ratio": 0.5}, head_pruning={"dense_ratio": 0.5})}),
    "023": ("ds_config.json", _TEMPLATE.format(stage=0, more="", prescale="false", last=""", "compression_training": {"head_pruning": {
        "shared_parameters": {"enabled": true, "num_heads": 12}, "different_groups": {"rp1": {"params": {"dense_ratio": DENSE_RATIO}}}}}""")),
    "024": _j({**_BATCH, **_WATCH, "optimizer": _ADAM, "zero_optimization": {"stage": 0}, "fp16": {"enabled": True},
               "compression_training": _compression(channel_pruning={"dense_ratio": 0.5})}),
    "025": _j({**_BATCH, **_WATCH, "optimizer": _ADAM, "zero_optimization": {"stage": 0}, "fp16": {"enabled": True},
               "compression_training": _compression(weight_quantization={"start_bits": 8, "target_bits": 8})}, end=""),
    "026": _j({**_BATCH, "steps_per_print": 10, "zero_optimization": {
        "stage": 3, "overlap_comm": True, "offload_param": _NONE, "offload_optimizer": {**_NONE, "ratio": 1.0},
        "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False, "zero_hpz_partition_size": 1, "zero_quantized_weights": False}, "bf16": {"enabled": True},
        "gradient_clipping": 1.0, "prescale_gradients": False, "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "tensorboard": {"enabled": False, "output_path": "x/", "job_name": "y"}}),
    "027": _j({**_BATCH, **_WATCH, "steps_per_print": 2000, "optimizer": _ADAM, "scheduler": {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}, "gradient_clipping": 1.0, "bf16": {"enabled": False},
        "fp16": {**_FP16, "fp16_master_weights_and_grads": False, "initial_scale_power": 15}, "zero_optimization": {
            "stage": 1, "cpu_offload": False, "allgather_bucket_size": 50000000}}),
    "030": ("ds_config.json", _TEMPLATE.format(stage=3, more=', "offload_optimizer": {"device": "cpu", "pin_memory": true, "ratio": 0.3}',
                                               prescale="false", last="")),
    "032": ("ds_config.json", _TEMPLATE.format(stage="ZERO_STAGE", more="", prescale="PRESCALE_GRAD", last=""", "curriculum_learning": {
        "enabled": CONFIG_CL_ENABLED}, "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}""")),
    "033": _j({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1}),
    "034": _j({**_BATCH, "zero_optimization": {"stage": 1}, "fp16": _FP16, "curriculum_learning": {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 60, "difficulty_step": 8}}}),
    "035": _j({**_BATCH, "gradient_clipping": 1.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0},
               "zero_allow_untested_optimizer": True, "steps_per_print": 100}),
    "036": ("ds_config.json", """{
  "train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE, "train_batch_size": $GLOBAL_BATCH_SIZE, "gradient_clipping": 1.0,
  "zero_optimization": { "stage": $ZERO_STAGE }, "bf16": { "enabled": true }, "steps_per_print": 2000, "wall_clock_breakdown": false
}"""),
    "037": ("ds_config.json", """{
  "train_batch_size": $GLOBAL_BATCH, "steps_per_print": 1,
  "zero_optimization": {"stage": $ZERO_STAGE, "offload_param": {"device": "cpu", "nvme_path": "/raid/scratch", "pin_memory": false}},
  "bf16": {"enabled": true}, "flops_profiler": {"enabled": true, "profile_step": 2, "output_file": null},
  "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1}, "comms_logger": {"enabled": true, "verbose": false},
  "wandb": {"enabled": true, "project": "GenSLM"}, "zero_force_ds_cpu_optimizer": false
}"""),
    "039": ("125M-dmoe.yml", """{
   # parallelism
   "pipe_parallel_size": 1, "model_parallel_size": 1, "moe_num_experts": 4,
   "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},
   "zero_optimization": {"stage": 1, "allgather_partitions": True}, "precision": "bfloat16", "train_micro_batch_size_per_gpu": 4,
}
"""),
    "040": ("gmlp_small.yml", """{
   "pipe_parallel_size": 1, "model_parallel_size": 1,  # cut
   "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e_8}},
   "fp16": {"enabled": true, "loss_scale": 0}, "train_micro_batch_size_per_gpu": 4,
}
"""),
    "041": _j({"pipe-parallel-size": 1, "model-parallel-size": 1, "comment": "tuned", "train_micro_batch_size_per_gpu": 1,
               "gradient_accumulation_steps ": 1, "optimizer": _ADAM, "zero_optimization": {"stage": [0, 1, 2, 3]},
               "fp16": {"fp16": True, "enabled": True}, "autotuning": {"enabled": True, "arg_mappings": {"a": "--b"}}}),
    "042": _j({"pipe-parallel-size": 1, "model-parallel-size": 1, "comment": "x", "train_micro_batch_size_per_gpu": 4,
               "gradient_accumulation_steps ": 1, "optimizer": _ADAM, "zero_optimization": {"stage": 0, "cpu_offload": False},
               "fp16": {"enabled": True}, "autotuning_config": {"enabled": True}}),
    "044": ("bnb_125M.yml", """{
   "pipe_parallel_size": 1, "model_parallel_size": 1, "use_bnb_optimizer": true,  # 8 bit
   "optimizer": {"type": "Adam", "params": {"lr": 0.0006}}, "zero_optimization": {"stage": 0}, "fp16": {"enabled": true},
   "train_micro_batch_size_per_gpu": 32,
}
"""),
    "045": _j({"fp16": {**_FP16}, "optimizer": _AUTO_ADAM, "scheduler": _AUTO_DECAY, "zero_optimization": {
        **_OFFLOADED, "stage3_gather_16bit_weights_on_model_save": "auto"}, **_AUTO_BATCH, "steps_per_print": 2000}, end=""),
    "046": _accelerate({"deepspeed_config_file": "inner.json  # relative", "zero3_init_flag": "true"}, precision="'no'"),
    "047": _j({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "seq_parallel_communication_data_type": "bf16",
               "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}, end=""),
    "048": ("invalid_keys.yaml", """compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
main_process_ip: null
main_process_port: null
mixed_precision: 'no'
num_processes: 1
invalid_key: "invalid_value"
another_invalid_key: "another_invalid_value"
"""),
    "050": ("qlora.yaml", _accelerate(_PLAIN3)[1].replace("LOCAL_MACHINE", "LOCAL_MACHINE" + " " * 300, 1)),
    "051": _accelerate(_PLAIN3),
    "052": _accelerate({**_PLAIN3, "seq_parallel_communication_data_type": "bf16"}, more="""# 2 × 2 ranks
parallelism_config:
  parallelism_config_sp_size: 2
  parallelism_config_dp_replicate_size: 1
  parallelism_config_sp_backend: deepspeed""", processes=4),
    "054": _j({"steps_per_print": 64, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
               "gradient_accumulation_steps": "auto", "bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": _Z3,
               "timers": {"throughput": {"enabled": True, "synchronized": False}}}),
    "055": _j({"_comment": "AutoTP", **_HF3, "zero_allow_untested_optimizer": True, "zero_optimization": {
        **_Z2, "round_robin_gradients": True}, "tensor_parallel": {"autotp_size": 2}}),
    "056": _j({"_comment": "fp8", **_AUTO_BATCH, "bf16": {"enabled": "auto"}, "fp16": {"enabled": False},
               "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": {
        **_Z3, "offload_optimizer": _CPU}, "csv_monitor": {"enabled": True, "output_path": "logs"},
               "monitor_config": {"enabled": True, "tag": "x"}, "comms_config": {"enabled": True}}),
    "060": _j({"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": "auto"}, "fp16": {**_AUTO_FP16, "auto_cast": False},
               "compile": {"disable": False, "backend": "inductor"}, **_AUTO_BATCH}),
    "061": _j({**_HF3, "zero_optimization": _OFFLOADED}),
    "062": _j({"gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
               "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": _OFFLOADED,
               "fp16": {"enabled": "auto", "initial_scale_power": 16}, "bf16": {"enabled": "auto"}}),
    "063": _j({"train_batch_size": 32, "steps_per_print": 20000000000000000, "bf16": {"enabled": True}, "fp16": {"enabled": False},
               "comms_logger": {"enabled": False, "verbose": False, "prof_all": False, "debug": False}}),
    "064": _accelerate(_PLAIN3, more="gpu_ids:"),
    "065": _j({"fp16": {"enabled": "auto"}, **_AUTO_BATCH, "zero_optimization": {
        **_OFFLOADED, "sub_group_size": 1e12, "reduce_bucket_size": 2e8, "stage3_prefetch_bucket_size": 2e8}}, end=""),
    "066": _j({"bf16": {"enabled": "auto"}, "optimizer": _AUTO_ADAM, "scheduler": _AUTO_DECAY, "zero_optimization": _OFFLOADED, **_AUTO_BATCH}),
    "067": _j({"fp16": {"enabled": False}, "bfloat16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {
        **_AUTO_ADAM["params"], "torch_adam": True, "adam_w_mode": True}}, "scheduler": _AUTO_DECAY, "zero_optimization": _Z3,
        **_AUTO_BATCH, "steps_per_print": 1e5}, end=""),
    "069": _j({"fp16": {"enabled": "true", "loss_scale": 0, "hysteresis": 2}, "zero_optimization": {**_Z2, "offload_optimizer": _CPU},
               "gradient_accumulation_steps": "8", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}),
    "070": ("config.yaml", """defaults:
  learning_rate: 1e-5
  adam_epsilon: 1e-12
  max_grad_norm: 2.0
  deepspeed_config: configs/zero_config.json
  freeze_layer:  # none
falcon-7b:
  learning_rate: 1e-5
"""),
    "071": _j({**_BATCH, "fp16": {"enabled": True, "min_loss_scale": 0.5, "fp16_scale_tolerance": 0.25, "opt_level": "O2"},
               "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
                                     "allgather_bucket_size": 5e8}}),
    "072": _accelerate({"gradient_accumulation_steps": "1", "offload_optimizer_device": "none", "offload_param_device": "none",
                        "zero3_init_flag": "false", "zero_stage": "2"}, more="megatron_lm_config: {}\nfsdp_config: {}"),
    "074": _j({**_AUTO_BATCH, "fp16": {"enabled": False}, "bf16": {"enabled": "auto"}, "communication_data_type": "fp32",
               "zero_optimization": _Z2}, end=""),
    "077": _j({**_HF3, "optimizer": _AUTO_ADAM, "scheduler": _AUTO_WARMUP, "zero_optimization": {
        **{k: v for k, v in _OFFLOADED.items() if "gather" not in k}, "gather_16bit_weights_on_model_save": True}}, end=""),
    "081": _j({**_BATCH, "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "weight_decay": 0.01, "var_freeze_step": 100}},
               "fp16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}}),
    "082": _j({**_BATCH, "optimizer": _ADAM, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
               "log": {"steps_per_print": 50}}),
    "083": _j({**_HF3, "zero_optimization": {**_Z3, "mics_shard_size": 64, "mics_hierarchical_params_gather": False}}),
    "084": _accelerate({"deepspeed_config_file": "inner.json", "zero3_init_flag": "true"}, precision="bf16", downcast="no"),
    "085": _j({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.1, "zero_optimization": {
        **_Z2, "load_from_fp32_weights": False}, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}, "optimizer": _ADAM, "activation_checkpointing": {
            "partition_activations": False, "contiguous_memory_optimization": False, "cpu_checkpointing": False}}, end=""),
    "086": _j({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 0.1, "zero_optimization": {
        **_Z2, "load_from_fp32_weights": False, "round_robin_gradients": True}, "offload_optimizer": {"device": "cpu"},
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": False}, "fp16": {"enabled": True}, "optimizer": _ADAM,
        "activation_checkpointing": {"partition_activations": False}}, end=""),
    "087": _j({"train_micro_batch_size_per_gpu": "auto", "zero_allow_untested_optimizer": True, "fp16": _AUTO_FP16, "zero_optimization": {
        **_Z2, "overlap_comm": False}}, crlf=True, end=""),
    "091": _accelerate({"zero_stage": "3", "offload_optimizer_device": "none", "offload_param_device": "none", "zero3_init_flag": "true",
                        "zero3_save_16bit_model": "true", "gradient_accumulation_steps": "1"}, precision="fp16", downcast='"no"', more="""command_file: null
commands: null
fsdp_config: {}
gpu_ids: null
megatron_lm_config: {}
tpu_name: null"""),
    "093": ("ds_config.json", """{
  "bf16" : { "enabled" : "auto" }, "zero_optimization" : { "stage" : 3, "reduce_bucket_size" : 5e8 },
  "train_batch_size" : "auto", "train_micro_batch_size_per_gpu" : "auto", "gradient_accumulation_steps" : "auto",
  "flops_profiler" : { "enabled" : false, "profile_step" : 1, "module_depth" : -1, "output_file" : null }
}"""),
    "094": _j({"bf16": {"enabled": "auto"}, "optimizer": _AUTO_ADAM, "scheduler": _AUTO_WARMUP, "zero_optimization": _OFFLOADED,
               **_AUTO_BATCH}, crlf=True, end=""),
    "095": _j({"bf16": {"enabled": "auto"}, "optimizer": _AUTO_ADAM, "scheduler": _AUTO_WARMUP, "zero_optimization": _OFFLOADED,
               **_AUTO_BATCH, "steps_per_print": 20}, crlf=True, end=""),
    "096": _j({**_AUTO_BATCH, "zero_allow_untested_optimizer": True, "bf16": {
        "enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "zero_optimization": _Z2}),
    "097": _j({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "optimizer": _ADAM,
               "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
               "fp16": {"enabled": True, "opt_level": "O2", "min_loss_scale": 1}, "bf16": {"enable": True}, "zero_optimization": {
        **_Z2, "offload_optimizer": {"device": "cpu"}}, "activation_checkpointing": {
        "partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": None}}),
    "098": ("main.json", "\n" + _j({
        "train_batch_size": 18, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1, "fp16": {
            "enabled": True, "auto_cast": True}, "bf16": {"enabled": False}, "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "none", "nvme_path": None}, "offload_param": {
                "device": "none", "nvme_path": None}}})[1]),
    "099": _j({**_BATCH, "zero_allow_untested_optimizer": True, "fp16": {"enabled": True, "loss_scale": 1.0}, "gradient_clipping": 1.0,
               "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}, "zero_optimization": {
        "stage": 3, "stage3_param_persitence_threshold": 1e5, "reduce_bucket_size": 5e8}}),
    "100": _j({**_BATCH, "zero_allow_untested_optimizer": True, "fp16": {"enabled": True, "loss_scale": 1.0}, "zero_optimization": {
        "stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}}),
    "102": ("zero3.yaml", """# composed by Hydra
train_micro_batch_size_per_gpu:
gradient_accumulation_steps:
prescale_gradients: False
optimizer:
  type: AdamW
  params: {lr: 1e-4, eps: 1e-6, weight_decay: "${weight_decay}"}
scheduler:
  type: WarmupDecayLR
  params: {total_num_steps: , warmup_max_lr: "${learning_rate}", warmup_num_steps: auto}
zero_optimization:
  stage: 3
  offload_optimizer: {device: cpu, pin_memory: true}
  stage3_param_persistence_threshold: 1e5
  stage3_max_live_parameters: 1e8
  offload_param: null
bf16: {enabled: true}
memory_efficient_linear: true
"""),
    "103": _j({"fp16": _AUTO_FP16, "optimizer": _AUTO_ADAM, "scheduler": _AUTO_WARMUP, "zero_optimization": {
        **_Z2, "offload_optimizer": {"device": "cpu"}, "find_unused_parameters": True}, **_AUTO_BATCH}),
    "105": _j({"amp": {"enabled": False, "opt_level": "O1"}, "fp16": {"enabled": False}, "bfloat16": {"enabled": True},
               "zero_force_ds_cpu_optimizer": False, "zero_optimization": {**_Z2, "offload_optimizer": {"device": "cpu"}},
               "activation_checkpointing": {"partition_activations": False}}),
    "106": _j({"_read_the_docs": "https://...", "fp16": {"enabled": True, "loss_scale": 0}, "msamp": {"enabled": False, "opt_level": "O1"},
               "zero_optimization": {"stage": 0, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8}, "prescale_gradients": True,
               "checkpoint": {"use_node_local_storage": False}, "tensorboard": {"enabled": False}, "train_micro_batch_size_per_gpu": 2}),
    "107": _j({"bf16": {"enabled": False}, "fp16": {"enabled": True}, "zero_allow_untested_optimizer": True,
               "zero_force_ds_cpu_optimizer": False, "zero_optimization": {**_Z3, "stage3_max_live_parameters": 1e8},
               "steps_per_print": 2000}, end=""),
    "108": _j({"dump_state": True, "fp16": _AUTO_FP16, "optimizer": _AUTO_ADAM, "scheduler": {"type": "WarmupDecayLR", "params": {
        "last_batch_iteration": -1, "total_num_steps": "auto", "warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 100,
        "warmup_type": "linear"}}, "zero_optimization": {**_Z2, "offload_optimizer": _CPU, "round_robin_gradients": True},
        "zero_allow_untested_optimizer": True, **_AUTO_BATCH}),
    "111": _j({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0,
               "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, end=""),
    "112": _j({"train_batch_size": 12288, "train_micro_batch_size_per_gpu": 64, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
               "zero_optimization": {"stage": 2, "reduce_bucket_size": 60000000}, "tensorboard": {"enabled": True},
               "timers": {"throughput": {"enabled": True, "synchronized": False}}, "zero_allow_untested_optimizer": True}),
    "113": _j({"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {
        "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False}, "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False,
        "overlap_events": True, "thread_count": 1}, "zero_allow_untested_optimizer": True, "zero_optimization": {
        "stage": 2, "contiguous_gradients": True, "overlap_comm": True, "allgather_bucket_size": 200000000, "sub_group_size": 1000000000000}}),
    "114": _j({"zero_allow_untested_optimizer": True, "train_batch_size": 8, "zero_optimization": {"stage": 2, "contiguous_gradients": True,
               "overlap_comm": True}, "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False,
               "contiguous_memory_optimization": False, "synchronize_checkpoint_boundary": False}, "fp16": {"enabled": False},
               "bf16": {"enabled": True}, "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
               "overlap_events": True}, "gradient_clipping": 1.0, "steps_per_print": 100000}),
    "118": _j({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_allow_untested_optimizer": True,
               "fp16": {**_FP16}, "zero_optimization": {"stage": 1}}, end=""),
    "119": _j({"fp16": _FP16, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8}}, "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}, "zero_optimization": {
        "stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU, "sub_group_size": 1e14, "reduce_bucket_size": 0,
        "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
        "stage3_gather_fp16_weights_on_model_save": True}}),
    "120": _j({**_HF3, "zero_optimization": {**{k: v for k, v in _Z3.items() if "gather" not in k}, "offload_optimizer": {
        "device": "nvme", "nvme_path": "/mnt/local_storage", "pin_memory": True, "buffer_count": 4, "fast_init": False},
        "round_robin_gradients": True, "gather_16bit_weights_on_model_save": True}}),
}  # fmt: skip

# What an Accelerate file names beside itself.
INNER = json.dumps({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}, **_AUTO_BATCH})
