"""Every config of the collection: a plan, or a refusal that names key and reason; docs/deepspeed.md counts them."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed_files import FILES, INNER

from partita.config.compose import compose_config, registry_for
from partita.config.deepspeed.apply import apply
from partita.config.deepspeed.report import VERDICTS
from partita.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "deepspeed.md"


@functools.cache
def small_config() -> Any:
    """A small model, composed once."""
    return compose_config(["model.layers=2", "model.width=32", "model.heads=2", "data.sequence=16"])[0]


def outcome(number: str, folder: Path) -> tuple[str, list[str], str]:
    """(plan or refused, keys that are refused, the message)."""
    from partita.plan.make import make_plan

    name, text = FILES[number]
    path = folder / name
    path.write_bytes(text.encode())
    (folder / "inner.json").write_text(INNER)
    config = copy.deepcopy(small_config())
    config.deepspeed = str(path)
    try:
        translation = apply(config, registry_for(()), [])
        make_plan(config, registry_for(())).raise_problems()
    except ConfigError as error:
        keys = [re.sub(r"^\d+\. ", "", line).split(": ")[0] for line in _heads(str(error))]
        return "refused", keys, str(error)
    assert translation is not None
    assert all(line.verdict in VERDICTS for line in translation.lines)
    return "plan", [], ""


def _heads(message: str) -> list[str]:
    lines = message.splitlines()
    return [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if after.strip().startswith("->")]


# Files that the translation refuses, with the keys that it names. All others become a plan, or the plan's own check refuses what this
# version can't carry out (tensor parallelism, a tier).
REFUSED: dict[str, set[str]] = {
    "002": {"hybrid_engine.enabled", "zero_optimization.offload_param.device"},
    "003": {"quantize_training", "eigenvalue"},
    "017": {"optimizer.params.max_grad_norm"},
    "021": {"train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "prescale_gradients", "fp16.enabled", "bf16.enabled",
            "data_efficiency"},
    "022": {"compression_training"},
    "023": {"train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "fp16.enabled", "bf16.enabled",
            "compression_training"},
    "024": {"compression_training"},
    "025": {"compression_training"},
    "030": {"train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "fp16.enabled", "bf16.enabled"},
    "032": {"train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "prescale_gradients", "zero_optimization.stage",
            "fp16.enabled", "bf16.enabled", "curriculum_learning.enabled", "compression_training"},
    "034": {"curriculum_learning.enabled"},
    "036": {"train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization.stage"},
    "037": {"train_batch_size", "zero_optimization.stage", "zero_optimization.offload_param.device"},
    "039": {"pipe_parallel_size", "model_parallel_size", "moe_num_experts", "precision"},
    "040": {"pipe_parallel_size", "model_parallel_size", "optimizer.params.eps"},
    "041": {"pipe-parallel-size", "model-parallel-size", "gradient_accumulation_steps ", "zero_optimization.stage", "fp16.fp16",
            "autotuning.enabled"},
    "042": {"pipe-parallel-size", "model-parallel-size", "gradient_accumulation_steps ", "autotuning_config"},
    "044": {"pipe_parallel_size", "model_parallel_size", "use_bnb_optimizer"},
    "048": {"invalid_key", "another_invalid_key"},
    "056": {"monitor_config", "comms_config"},
    "070": {"defaults", "falcon-7b"},
    "071": {"fp16.fp16_scale_tolerance", "fp16.opt_level", "zero_optimization.offload_param.device"},
    "081": {"optimizer.type"},
    "082": {"log"},
    "085": {"offload_optimizer"},
    "086": {"offload_optimizer"},
    "096": {"bf16.loss_scale", "bf16.initial_scale_power", "bf16.loss_scale_window", "bf16.hysteresis", "bf16.min_loss_scale"},
    "097": {"fp16.opt_level", "bf16.enable"},
    "099": {"zero_optimization.stage3_param_persitence_threshold", "optimizer.params.max_grad_norm"},
    "102": {"memory_efficient_linear", "optimizer.params.weight_decay", "scheduler.params.warmup_max_lr"},
    "103": {"zero_optimization.find_unused_parameters"},
}  # fmt: skip
# Their optimizer may or may not be installed: refused by name, or taken over.
EITHER = {"014", "015"}
# What the plan's check may refuse, key of ours, because of the machine or of this version.
PLAN_KEYS = ("offload.", "parallel.", "train.global_batch", "zero.", "compression.", "recompute.", "optimizer.", "launch.")


@pytest.mark.parametrize("number", FILES)
def test_each_file_becomes_a_plan_or_a_refusal_that_names_its_keys(number: str, tmp_path: Path) -> None:
    kind, keys, message = outcome(number, tmp_path)
    if number in REFUSED:
        assert kind == "refused"
        assert set(keys) == REFUSED[number], message
    elif number in EITHER:
        assert kind == "plan" or keys[0].startswith("optimizer."), message
    elif kind == "refused":
        assert all(k.startswith(PLAN_KEYS) for k in keys), message
    if kind == "refused":
        assert message.count("->") == len(keys)


def docs_table() -> str:
    """The table of docs/deepspeed.md."""
    taken = sorted(set(FILES) - set(REFUSED) - EITHER)
    rows = [f"| {n} | {', '.join(f'`{k}`' for k in sorted(REFUSED[n]))} |" for n in sorted(REFUSED)]
    head = [
        f"Of {len(FILES)} public files rebuilt in `tests/config/deepspeed_files.py`, {len(taken)} are taken over, {len(REFUSED)} refused by",
        f"key, and {len(EITHER)} name an optimizer that a plug-in may provide. Taken over: {', '.join(taken)}.",
        "",
        "| file | refused because of |",
        "|---|---|",
    ]
    return "\n".join([*head, *rows])


def test_docs_count_them() -> None:
    assert docs_table() in DOCS.read_text()
