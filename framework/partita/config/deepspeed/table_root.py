"""Rules for keys at the top level, for numbers (fp16, bf16, ...) and for what is shown and measured."""

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
    amount,
    anything,
    boolean,
    count,
    dropped,
    integer,
    number,
    positive,
    size,
    text,
    under,
    words,
)

DTYPES = {
    "fp16": "float16", "float16": "float16", "half": "float16", "torch.float16": "float16",
    "bf16": "bfloat16", "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16",
    "fp32": "float32", "float32": "float32", "float": "float32", "torch.float32": "float32",
}  # fmt: skip
dtype = words(*DTYPES)

_SUMS = "sums are made in float32, of a loss that is divided once by the global number of tokens"
_CLI = "the command line's value, else Partita's default"
_METRICS = "metrics.jsonl has loss, norm, seconds, tokens/s and memory of every step"

ROOT = Table(
    rules={
        "train_batch_size": Rule(count, Later(), auto=_CLI),
        "train_micro_batch_size_per_gpu": Rule(count, Later(), auto=_CLI),
        "gradient_accumulation_steps": Rule(count, Later(), auto=_CLI),
        "managed_gradient_accumulation": Rule(
            boolean,
            Cases(
                {True: Drop("an update always has all its micro-batches")},
                Deny(
                    "the training loop owns the end of an update", "leave it out, and drive the steps yourself: partita.prepare"
                ),
            ),
        ),
        "steps_per_print": Rule(count, Take("train.log_every"), auto=_CLI),
        "wall_clock_breakdown": Rule(boolean, Drop(_METRICS)),
        "memory_breakdown": Rule(boolean, Drop("the plan shows memory by category, and metrics.jsonl that of every step")),
        "dump_state": Rule(boolean, Drop("config.yaml, plan.yaml and manifest.yaml are written for every run")),
        "log_level": Rule(
            words("debug", "info", "warning", "error", "critical"), Take("launch.log_level", {"critical": "error"})
        ),
        "gradient_clipping": Rule(amount, Take("train.grad_clip"), auto=_CLI),
        "communication_data_type": Rule(dtype, Take("precision.reduce", DTYPES, note=_SUMS)),
        "seq_parallel_communication_data_type": Rule(
            dtype, Drop("gradients are reduced over context and data in one message; communication_data_type says its dtype")
        ),
        "prescale_gradients": Rule(boolean, Drop(_SUMS)),
        "gradient_predivide_factor": Rule(number, Drop(_SUMS)),
        "gradient_allreduce_op": Rule(
            words("mean", "sum"),
            Cases(
                {"mean": Drop(_SUMS)},
                Deny(
                    "the loss is a mean over all tokens, whatever the number of ranks",
                    "use mean; for SGD multiply lr by the ranks",
                ),
            ),
        ),
        "sparse_gradients": Rule(
            boolean,
            Deny("gradients of embeddings are dense", "leave it out", unless=(False,)),
        ),
        "zero_allow_untested_optimizer": Rule(boolean, Drop("every update rule works on every placement")),
        "zero_force_ds_cpu_optimizer": Rule(boolean, Drop("the update rule of optimizer.name runs where the states live")),
        "graph_harvesting": Rule(boolean, Drop("it changes no result; an update is one fused pass here")),
        "use_data_before_expert_parallelism": Rule(boolean, Drop("experts fold over the data axes, which adds no ranks")),
        "dataloader_drop_last": Rule(boolean, Drop("an update goes on into the next epoch, so there is no partial batch")),
        "vocabulary_size": Rule(count, Drop("DeepSpeed uses it for a warning only; model.vocab pads a vocabulary")),
        "sequence_parallel_size": Rule(count, Take("parallel.context")),
        "data_parallel_size": Rule(count, Take("parallel.data")),
        **dropped({boolean: ["disable_allgather"]}, "it has had no effect for years"),
    },
    aliases={"use_data_before_expert_parallelism_": "use_data_before_expert_parallelism"},
    strangers={
        "offload_optimizer": "it belongs into zero_optimization; where it stands, DeepSpeed ignores it",
        "offload_param": "it belongs into zero_optimization; where it stands, DeepSpeed ignores it",
        "cpu_offload": "it belongs into zero_optimization; where it stands, DeepSpeed ignores it",
        "monitor_config": "no version of DeepSpeed reads it; csv_monitor, tensorboard and wandb stand at the top level",
        "comms_config": "no version of DeepSpeed reads it; comms_logger stands at the top level",
        "msamp": "it is MS-AMP's own key; fp8 is not what DeepSpeed would do with it",
        "log": "no version of DeepSpeed reads it; steps_per_print stands at the top level",
        "replace_with_kernel_inject": "it is a key of DeepSpeed's inference config; Partita trains",
        "max_out_tokens": "it is a key of DeepSpeed's inference config; Partita trains",
        "state_manager": "it is a key of DeepSpeed's inference config; Partita trains",
        "injection_policy": "it is a key of DeepSpeed's inference config; Partita trains",
        "pipe_parallel_size": "it is GPT-NeoX's key, not DeepSpeed's; write parallel.pipeline",
        "pipe-parallel-size": "it is GPT-NeoX's key, not DeepSpeed's; write parallel.pipeline",
        "model_parallel_size": "it is GPT-NeoX's key, not DeepSpeed's; write parallel.tensor",
        "model-parallel-size": "it is GPT-NeoX's key, not DeepSpeed's; write parallel.tensor",
        "max_grad_norm": "it is the trainer's key; write gradient_clipping",
        "learning_rate": "it is the trainer's key; write optimizer.params.lr",
    },
)

# ------------------------------------------------------------------ numbers

_FLAG = "on where precision= of the command line says so, else off"
_NOT_FIXED = ("fp16.loss_scale", (0.0, None), "the loss scale is fixed")

PRECISION = Table(
    sections={
        "fp16": Section("enabled"),
        "bf16": Section("enabled"),
        "amp": Section("enabled", open="apex's arguments; the section is switched off"),
        "torch_autocast": Section("enabled"),
        "data_types": Section(),
    },
    rules={
        **under(
            "fp16",
            {
                "enabled": Rule(boolean, Later(), auto=_FLAG),
                "auto_cast": Rule(boolean, Drop("inputs are token ids; activations are in the compute dtype")),
                "loss_scale": Rule(amount, Later(), auto="0: dynamic", default=0.0),
                "initial_scale_power": Rule(
                    size,
                    Take("precision.loss_scale.initial", lambda power: float(2 ** min(power, 120))),
                    auto="16",
                    needs=_NOT_FIXED,
                    default=16,
                ),
                "loss_scale_window": Rule(
                    count, Take("precision.loss_scale.interval"), auto="1000", needs=_NOT_FIXED, default=1000
                ),
                "hysteresis": Rule(count, Take("precision.loss_scale.hysteresis"), auto="2", needs=_NOT_FIXED, default=2),
                "consecutive_hysteresis": Rule(boolean, Drop("overflows in a row count (as with true)")),
                "min_loss_scale": Rule(
                    positive, Take("precision.loss_scale.minimum", float), auto="1", needs=_NOT_FIXED, default=1
                ),
                "fp16_master_weights_and_grads": Rule(
                    boolean,
                    Deny(
                        "float16 weights lose updates smaller than 1/2048 of them",
                        "leave it out; with bf16 there is bf16_master_weights_and_grads",
                        unless=(False,),
                    ),
                ),
            },
        ),
        **under(
            "bf16",
            {
                "enabled": Rule(boolean, Later(), auto=_FLAG),
                "immediate_grad_update": Rule(
                    boolean, Drop("gradients of micro-batches are always summed in precision.gradient")
                ),
                "check_grad_overflow": Rule(
                    boolean,
                    Cases(
                        {True: Take("train.on_nonfinite", lambda _: "skip")},
                        Drop("an update that is not finite is never applied; train.on_nonfinite says what then"),
                    ),
                ),
                "bf16_master_weights_and_grads": Rule(
                    boolean, Cases({True: Take("precision.master", lambda _: "bfloat16")}, Drop("master weights are float32"))
                ),
                "bf16_optimizer_states": Rule(
                    boolean, Cases({True: Take("precision.optimizer", lambda _: "bfloat16")}, Drop("moments are float32"))
                ),
            },
        ),
        "amp.enabled": Rule(
            boolean,
            Deny("apex is not used (nor by newer DeepSpeed)", 'write {"bf16": {"enabled": true}}', unless=(False,)),
            auto=_FLAG,
        ),
        "amp.opt_level": Rule(anything, Drop("an argument of apex"), auto="an argument of apex"),
        "torch_autocast.enabled": Rule(boolean, Later()),
        "torch_autocast.dtype": Rule(dtype, Later()),
        "torch_autocast.lower_precision_safe_modules": Rule(
            anything,
            Deny(
                "all modules compute in one dtype; norms, softmax and loss are in float32 inside", "leave it out", unless=(None,)
            ),
        ),
        "data_types.grad_accum_dtype": Rule(dtype, Take("precision.gradient", DTYPES)),
        "data_types.param_dtype": Rule(dtype, Take("precision.compute", DTYPES)),
        "data_types.buffer_dtype": Rule(dtype, Drop("buffers keep the dtype that the model gives them")),
    },
    aliases={"bfloat16": "bf16"},
    strangers={
        "fp16.opt_level": "it is apex's key",
        "fp16.fp16_scale_tolerance": "it is fairseq's key",
        "fp16.fp16": "it is GPT-NeoX's key; `enabled` says it",
        "bf16.loss_scale": "bf16 has no loss scale",
        "bf16.initial_scale_power": "bf16 has no loss scale",
        "bf16.loss_scale_window": "bf16 has no loss scale",
        "bf16.hysteresis": "bf16 has no loss scale",
        "bf16.min_loss_scale": "bf16 has no loss scale",
    },
)

# ------------------------------------------------------------------ what is shown and measured

_CURVES = "the curves are in metrics.jsonl and, with tracker=wandb, in W&B"

WATCHING = Table(
    sections={
        "flops_profiler": Section("enabled"),
        "comms_logger": Section("enabled"),
        "timers": Section(),
        "timers.throughput": Section("enabled", on_by_default=True),
        "tensorboard": Section("enabled"),
        "csv_monitor": Section("enabled"),
        "wandb": Section("enabled"),
        "comet": Section("enabled"),
        "autotuning": Section("enabled", open="the tuner's own"),
    },
    rules={
        **under("flops_profiler", {
            "enabled": Rule(boolean, Drop("the plan shows FLOPs, and metrics.jsonl MFU where the peak of the device is known")),
            **dropped({number: ["recompute_fwd_factor"], integer: ["profile_step", "module_depth", "top_modules"],
                       boolean: ["detailed"], anything: ["output_file"]}, "of DeepSpeed's own profile"),
        }),
        **under("comms_logger", {
            "enabled": Rule(boolean, Drop("the plan shows the bytes on each link")),
            **dropped({boolean: ["verbose", "prof_all", "debug"], anything: ["prof_ops"]}, "of DeepSpeed's own log"),
        }),
        **under("timers.throughput", dropped({boolean: ["enabled", "synchronized"]}, _METRICS)),
        **under("tensorboard", {
            "enabled": Rule(boolean, Drop(_CURVES + "; nothing is written for TensorBoard")),
            **dropped({text: ["output_path", "job_name"]}, "nothing is written for TensorBoard"),
        }),
        **under("csv_monitor", dropped({boolean: ["enabled"], text: ["output_path", "job_name"]}, _METRICS)),
        **under("wandb", {
            "enabled": Rule(boolean, Cases({True: Take("tracker.name", lambda _: "wandb")},
                                           Drop("tracker.name says whether W&B is used"))),
            "project": Rule(text, Take("tracker.project")),
            "team": Rule(text, Take("tracker.entity")),
            "group": Rule(text, Drop("runs are grouped by sweep")),
        }),
        "comet.enabled": Rule(boolean, Deny("there is no tracker for Comet", "take the section out; " + _CURVES, unless=(False,))),
        **under("comet", dropped({anything: ["samples_log_interval", "project", "workspace", "api_key", "experiment_name",
                                             "experiment_key", "online", "mode"]}, "of a tracker that is off")),
        "autotuning.enabled": Rule(boolean, Deny(
            "an autotuner run of DeepSpeed's starts jobs of its own",
            "take the section out: `auto` degrees are solved by the plan, and -m sweeps what you want measured", unless=(False,))),
    },
    strangers={"wandb.entity": "DeepSpeed calls it team", "wandb.name": "write run.name"},
)  # fmt: skip
