"""Accelerate's YAML around a DeepSpeed config: its keys in DeepSpeed's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.config.deepspeed.hjson import Bare
from partita.config.deepspeed.reading import read
from partita.config.deepspeed.report import REFUSED, TAKEN, UNNEEDED, Line
from partita.config.deepspeed.rules import AUTO, shown
from partita.errors import nearest
from partita.plan.problems import Problem

MARKS = ("compute_environment", "distributed_type", "deepspeed_config")

# of `deepspeed_config` -> DeepSpeed's path
INNER = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "seq_parallel_communication_data_type": "seq_parallel_communication_data_type",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# of `deepspeed_config` -> why it is not needed
INNER_DROPPED = {
    "zero3_init_flag": "models are always built without memory and filled shard by shard",
    "deepspeed_hostfile": "torchrun or Slurm starts ranks on several nodes",
    "deepspeed_multinode_launcher": "torchrun or Slurm starts ranks on several nodes",
    "deepspeed_moe_layer_cls_names": "a block is gathered as a whole anyway",
    "deepspeed_inclusion_filter": "torchrun or Slurm starts ranks on several nodes",
    "deepspeed_exclusion_filter": "torchrun or Slurm starts ranks on several nodes",
}
_HERE = "it is about how Accelerate starts processes; torchrun and Slurm are joined, else Partita starts the ranks"
OUTER_DROPPED = {
    **dict.fromkeys(
        (
            "compute_environment", "distributed_type", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
            "num_machines", "rdzv_backend", "same_network", "use_cpu", "gpu_ids", "command_file", "commands", "debug", "tpu_env",
            "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm", "enable_cpu_affinity", "mpirun_config", "fp8_config",
            "ipex_config", "rdzv_conf", "deepspeed_config_file",
        ),
        _HERE,
    ),
    "downcast_bf16": "it is for TPUs",
    "dynamo_backend": "nothing is compiled",
    "dynamo_config": "nothing is compiled",
    "use_stateful_dataloader": "the position in the data is always in the checkpoint",
}  # fmt: skip
ONLY_EMPTY = ("fsdp_config", "megatron_lm_config", "mpirun_config", "aws_config")
PARALLEL = {
    "parallelism_config_cp_size": "parallel.context",
    "parallelism_config_sp_size": "parallel.context",
    "parallelism_config_tp_size": "parallel.tensor",
    "parallelism_config_dp_replicate_size": "parallel.replicate",
    "parallelism_config_dp_shard_size": "parallel.shard",
}
PRECISIONS = {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16"), "no": (None, None)}


@dataclass
class Unwrapped:
    """tree: the DeepSpeed config. values: our keys that the wrapper says. lines: what became of the wrapper's own keys."""

    tree: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    where: str = ""

    def say(self, path: str, value: Any, verdict: str, why: str = "", key: str = "", got: Any = None, remedy: str = "") -> None:
        """A line of the report."""
        self.lines.append(Line(path, shown(value), verdict, key, shown(got) if key else "", why, remedy))


def is_wrapper(tree: Mapping[str, Any]) -> bool:
    """Whether a file is Accelerate's."""
    return "deepspeed_config" in tree or sum(mark in tree for mark in MARKS) > 1


def unwrap(tree: Mapping[str, Any], folder: Path) -> Unwrapped:
    """What a wrapper holds. folder: of the wrapper, for the file that it may name. Raises ConfigError where that can't be read."""
    out = Unwrapped()
    inner = tree.get("deepspeed_config") or {}
    if not isinstance(inner, Mapping):
        out.say("deepspeed_config", inner, REFUSED, "it must be a block of keys", remedy="write zero_stage and its like into it")
        inner = {}
    _inner(out, inner, folder)
    for key, value in tree.items():
        if key != "deepspeed_config":
            _outer(out, str(key), value)
    return out


def _inner(out: Unwrapped, inner: Mapping[str, Any], folder: Path) -> None:
    file = inner.get("deepspeed_config_file")
    if isinstance(file, str) and file:
        beside = folder / file
        found = read(str(beside if beside.exists() else file))
        out.tree, out.where = dict(found.values), found.where
        out.say("deepspeed_config.deepspeed_config_file", file, TAKEN, "its keys follow")
    for key, value in inner.items():
        path = f"deepspeed_config.{key}"
        if key == "deepspeed_config_file":
            if not (isinstance(value, str) and value):
                out.say(path, value, UNNEEDED, "no file is named")
        elif key in INNER:
            _put(out, path, INNER[key], value)
        elif key in INNER_DROPPED:
            out.say(path, value, UNNEEDED, INNER_DROPPED[key])
        else:
            near = nearest(str(key), [*INNER, *INNER_DROPPED, "deepspeed_config_file"])
            out.say(
                path, value, REFUSED, "Accelerate has no such key", remedy=f"did you mean {near[0]}?" if near else "take it out"
            )


def _put(out: Unwrapped, path: str, target: str, value: Any) -> None:
    """A key of the wrapper under DeepSpeed's name; the file that it wraps must not say otherwise."""
    if value is None or (value == "none" and target.endswith("device") and not _stands(out.tree, target)):
        out.say(path, value, UNNEEDED, "off")
        return
    node: Any = out.tree
    *parents, leaf = target.split(".")
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        out.say(path, value, REFUSED, f"{'.'.join(parents)} of the wrapped file is no block of keys", remedy="correct that")
        return
    before = node.get(leaf, AUTO)
    if before != AUTO and before != value:
        out.say(
            path,
            value,
            REFUSED,
            f"the wrapped file says {target} = {shown(before)}",
            remedy='keep one of them, or write "auto" there',
        )
        return
    node[leaf] = value
    out.say(path, value, TAKEN, f"as {target}")


def _stands(tree: Mapping[str, Any], path: str) -> bool:
    node: Any = tree
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _outer(out: Unwrapped, key: str, value: Any) -> None:
    if key == "mixed_precision":
        _mixed(out, value)
    elif key == "num_processes" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        out.values["launch.ranks"] = value
        out.say(key, value, TAKEN, key="launch.ranks", got=value)
    elif key == "parallelism_config" and isinstance(value, Mapping):
        for inner, size in value.items():
            _parallel(out, str(inner), size)
    elif key in ONLY_EMPTY:
        empty = not value
        out.say(key, value, UNNEEDED if empty else REFUSED, "empty" if empty else "it is for another backend than DeepSpeed",
                remedy="" if empty else "take it out")  # fmt: skip
    elif key in OUTER_DROPPED:
        out.say(key, value, UNNEEDED, OUTER_DROPPED[key])
    elif key in ("gradient_accumulation_steps", "gradient_clipping"):
        _put(out, key, key, value)
    else:
        near = nearest(key, [*OUTER_DROPPED, *ONLY_EMPTY, "mixed_precision", "num_processes", "deepspeed_config"])
        out.say(key, value, REFUSED, "Accelerate has no such key", remedy=f"did you mean {near[0]}?" if near else "take it out")


def _parallel(out: Unwrapped, key: str, size: Any) -> None:
    path = f"parallelism_config.{key}"
    target = PARALLEL.get(key)
    if target is None:
        out.say(path, size, UNNEEDED, "it changes no result: the layout is the plan's")
    elif isinstance(size, int) and not isinstance(size, bool) and size > 0:
        if size == 1 or target in out.values:
            out.say(path, size, UNNEEDED, "one rank")
            return
        out.values[target] = size
        out.say(path, size, TAKEN, key=target, got=size)
    else:
        out.say(path, size, REFUSED, "it is no count", remedy="write a whole number of at least 1")


def _mixed(out: Unwrapped, value: Any) -> None:
    word = "no" if value is False else str(value).lower() if isinstance(value, str | Bare) else ""
    if word not in PRECISIONS:
        out.say("mixed_precision", value, REFUSED, "it is no precision", remedy="write no, bf16 or fp16")
        return
    on, off = PRECISIONS[word]
    for name, wanted in ((on, True), (off, False)) if on else (("fp16", False), ("bf16", False)):
        assert name is not None
        block = out.tree.get(name)
        said = block.get("enabled") if isinstance(block, Mapping) else None
        if said not in (None, AUTO) and bool(said) != wanted:
            reason = f"the wrapped file says {name}.enabled = {shown(said)}"
            out.say("mixed_precision", value, REFUSED, reason, remedy='keep one of them, or write "auto" there')
            return
        if isinstance(block, Mapping) or wanted:
            out.tree[name] = {**(block if isinstance(block, Mapping) else {}), "enabled": wanted}
    out.say("mixed_precision", value, TAKEN, f"as {on}.enabled" if on else "as fp16 and bf16 switched off")


def problems(lines: list[Line]) -> list[Problem]:
    """Refusals among lines."""
    return [Problem(line.path, line.why, line.remedy) for line in lines if line.verdict == REFUSED]
