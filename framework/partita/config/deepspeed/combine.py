"""What several keys decide together: the batch, the dtype, the ZeRO preset, and combinations that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.config.deepspeed.rules import AUTO, shown
from partita.config.deepspeed.table_root import DTYPES

if TYPE_CHECKING:
    from partita.config.deepspeed.walk import Work

GLOBAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
STAGE = "zero_optimization.stage"
HPZ, MICS = "zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"
MODES = ("fp16", "bf16")
OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"

# ------------------------------------------------------------------ the batch


def batch(work: Work) -> None:
    """train_batch_size = micro x accumulation x data ranks. What DeepSpeed works out stays `auto`, and the plan works it out."""
    whole, micro, steps = (work.facts.get(path) for path in (GLOBAL, MICRO, STEPS))
    known = {p: v for p, v in ((GLOBAL, whole), (MICRO, micro), (STEPS, steps)) if isinstance(v, int)}
    if whole is None and micro is None and steps is None:
        work.fill(
            GLOBAL, "", None, "no batch size in the file: train.global_batch and train.micro_batch of the command line or Partita"
        )
        return
    keys = {GLOBAL: "train.global_batch", MICRO: "train.micro_batch", STEPS: "parallel.microbatches"}
    for path, value in known.items():
        work.take(path, keys[path], value)
    for path in (p for p, v in ((GLOBAL, whole), (MICRO, micro), (STEPS, steps)) if v == AUTO):
        _auto_batch(work, path, keys[path], known)
    if steps is None and len(known) == 1 and STEPS not in known and AUTO not in (whole, micro):
        work.fill(STEPS, "parallel.microbatches", 1, "DeepSpeed accumulates only where the file says so")
    if whole is None and MICRO in known:
        work.fill(GLOBAL, "train.global_batch", AUTO, "micro-batch x accumulation x data ranks")
    if len(known) == 3:
        _ranks(work, *known.values())


def _auto_batch(work: Work, path: str, key: str, known: dict[str, int]) -> None:
    if path == GLOBAL:
        value, rule = (
            (AUTO, "micro-batch x accumulation x data ranks")
            if MICRO in known
            else (None, "the command line or Partita's default")
        )
    else:
        value, rule = AUTO, "what train_batch_size, the ranks and the other one leave"
    work.fill(path, key if value is not None else "", value, rule)


def _ranks(work: Work, whole: int, micro: int, steps: int) -> None:
    """All three are given: they fix the number of data ranks, unless the command line has."""
    data, rest = divmod(whole, micro * steps)
    if rest:
        equation = f"{whole} = {micro} x {steps} x data ranks has no whole solution"
        legal = " or ".join(str(n) for n in (whole - rest, whole - rest + micro * steps) if n)
        work.deny(GLOBAL, f"train_batch_size = micro-batch x accumulation x data ranks: {equation}", f"use {legal}")
    elif not work.ranks_given:
        work.fill("data ranks", "parallel.data", data, "train_batch_size / (micro-batch x accumulation)")


# ------------------------------------------------------------------ numbers


def precision(work: Work) -> None:
    """fp16, bf16 and torch_autocast: one of them."""
    flags = {name: work.facts.get(f"{name}.enabled") for name in MODES}
    for name, flag in flags.items():
        path = f"{name}.enabled"
        if flag == AUTO:
            asked = work.current("precision.name") == name
            flags[name] = asked or None
            work.fill(path, "", None, f"{'on, as' if asked else 'off, unless'} the command line says precision={name}")
        elif flag is False:
            work.drop(path, "precision is another one")
    if flags["fp16"] is True and flags["bf16"] is True:
        work.deny("fp16.enabled", "fp16.enabled and bf16.enabled are two answers to one question", "switch one of the two off")
        return
    on = next((name for name, flag in flags.items() if flag is True), None)
    if on:
        work.take(f"{on}.enabled", "precision.name", on)
    if on == "fp16":
        _loss_scale(work)
    else:
        work.drop("fp16.loss_scale", "no loss scale outside fp16")
    _autocast(work, on)


def _loss_scale(work: Work) -> None:
    path, scale = "fp16.loss_scale", work.facts.get("fp16.loss_scale")
    if scale in (None, AUTO, 0.0):
        work.take(path, "precision.loss_scale.dynamic", True) if scale == 0.0 else work.fill(
            path, "precision.loss_scale.dynamic", True, "0: dynamic"
        )
        work.defaults("fp16")
        return
    work.take(path, "precision.loss_scale.initial", float(scale))
    work.values["precision.loss_scale.dynamic"] = False
    work.values["precision.loss_scale.minimum"] = min(1.0, float(scale))


def _autocast(work: Work, on: str | None) -> None:
    enabled, dtype = work.facts.get("torch_autocast.enabled"), work.facts.get("torch_autocast.dtype")
    if not enabled:
        work.drop("torch_autocast.enabled", "off")
        return
    if on:
        work.deny(
            "torch_autocast.enabled", f"torch_autocast and {on} are two answers to one question", "switch one of the two off"
        )
        return
    name = {"float16": "fp16", "bfloat16": "bf16"}.get(DTYPES.get(dtype or "bfloat16", ""))
    if name is None:
        work.deny("torch_autocast.dtype", f"{dtype} is no dtype to cast to", "use bfloat16 or float16")
        return
    work.take("torch_autocast.enabled", "precision.name", name, "compute in it, master weights in float32")
    work.drop("torch_autocast.dtype", "precision.name says it")


# ------------------------------------------------------------------ ZeRO


def zero(work: Work) -> None:
    """Stage, or the preset that MiCS and hpZ stand for."""
    stage, mics, hpz = (work.facts.get(path) for path in (STAGE, MICS, HPZ))
    if stage == AUTO:
        work.deny(STAGE, "nobody fills this `auto`; DeepSpeed takes stage 0 without a word", "write 0, 1, 2 or 3")
        return
    group = isinstance(mics, int) and mics > 0
    local = isinstance(hpz, int) and hpz > 1
    if group and local:
        work.deny(MICS, "MiCS and hpZ are two answers to one question", "leave one of them out")
        return
    if (group or local) and stage != 3:
        path, name = (MICS, "MiCS") if group else (HPZ, "hpZ")
        work.deny(path, f"{name} has an effect with stage 3 only, and the stage is {stage or 0}", "use stage 3, or leave it out")
        return
    preset = ("hsdp", MICS, mics) if group else ("hpz", HPZ, hpz) if local else None
    if preset:
        work.take(STAGE, "zero.preset", preset[0])
        work.take(preset[1], "zero.shard_size", preset[2])
    elif stage is not None:
        work.take(STAGE, "zero.stage", stage)
    if not group:
        work.drop(MICS, "off: one shard group of all data ranks")
    if not local:
        work.drop(HPZ, "off: weights are cut over all data ranks")


def gradients_follow(work: Work) -> None:
    """With the optimizer in host memory, gradients are kept there as well (ZeRO-Offload)."""
    if work.values.get("offload.optimizer") == "host" and work.facts.get(STAGE) in (1, 2, 3):
        work.fill("gradients", "offload.gradients", "host", "they follow the optimizer (ZeRO-Offload)")


# ------------------------------------------------------------------ what doesn't go together


@dataclass(frozen=True)
class Clash:
    """path is refused where `when` holds."""

    path: str
    when: Callable[[Work], Any]
    why: Callable[[Work], str]
    remedy: str


def _nvme_without_path(path: str) -> Callable[[Work], Any]:
    return lambda w: _place(w, path) == "nvme" and not w.facts.get(f"{path}.nvme_path")


def _on_below_3(key: str) -> Callable[[Work], Any]:
    return lambda w: w.facts.get(f"zero_optimization.{key}") is True and _stage(w) < 3


def _both_names(old: str, path: str) -> Callable[[Work], Any]:
    return lambda w: w.facts.get(f"zero_optimization.{old}") is True and path in w.blocks


def _old_name_of(path: str) -> Callable[[Work], str]:
    return lambda w: f"it is the old name of {path}, which stands there too"


def _stage(work: Work) -> int:
    stage = work.facts.get(STAGE)
    return stage if isinstance(stage, int) else 0


def _place(work: Work, path: str) -> str:
    device = work.facts.get(f"{path}.device")
    return device if device in ("cpu", "nvme") else ""


def _one_bit(work: Work) -> bool:
    kind = str(work.facts.get("optimizer.type") or "").lower()
    return kind in ("onebitadam", "zerooneadam", "onebitlamb")


CLASHES: tuple[Clash, ...] = (
    Clash(
        f"{PARAM}.device",
        lambda w: _place(w, PARAM) and _stage(w) < 3,
        lambda w: f"offload_param works with stage 3 only, and stage is {_stage(w)}; DeepSpeed ignores it without a word",
        "use zero_optimization.stage 3, or take offload_param out",
    ),
    Clash(
        f"{OPTIMIZER}.device",
        lambda w: _place(w, OPTIMIZER) and _stage(w) == 0,
        lambda w: "offload_optimizer has no effect with stage 0; DeepSpeed ignores it without a word",
        "use zero_optimization.stage 1, 2 or 3, or take offload_optimizer out",
    ),
    *(
        Clash(
            f"{path}.nvme_path",
            _nvme_without_path(path),
            lambda w: "device nvme needs a folder",
            "write the folder of a fast local disk",
        )
        for path in (PARAM, OPTIMIZER)
    ),
    Clash(
        f"{PARAM}.nvme_path",
        lambda w: (
            _place(w, PARAM) == _place(w, OPTIMIZER) == "nvme"
            and w.facts.get(f"{PARAM}.nvme_path") != w.facts.get(f"{OPTIMIZER}.nvme_path")
        ),
        lambda w: "parameters and optimizer would go to two folders; the file tier has one",
        "give both the same nvme_path",
    ),
    Clash(
        f"{OPTIMIZER}.ratio",
        lambda w: _place(w, PARAM) and _number(w.facts.get(f"{OPTIMIZER}.ratio"), 1.0) < 1,
        lambda w: "a share of the optimizer and all of the parameters can't be offloaded at once",
        "use ratio 1, or take offload_param out",
    ),
    *(
        Clash(
            f"zero_optimization.{key}",
            _on_below_3(key),
            lambda w: f"it works with stage 3 only, and stage is {_stage(w)}; DeepSpeed ignores it without a word",
            "use zero_optimization.stage 3, or leave it out",
        )
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    *(
        Clash(
            f"zero_optimization.{old}",
            _both_names(old, path),
            _old_name_of(path),
            "keep the new one",
        )
        for old, path in (("cpu_offload", OPTIMIZER), ("cpu_offload_param", PARAM))
    ),
    Clash(
        "zero_optimization.cpu_offload",
        lambda w: w.facts.get("zero_optimization.cpu_offload") is True and _stage(w) == 0,
        lambda w: "offload has no effect with stage 0",
        "use zero_optimization.stage 1, 2 or 3, or leave it out",
    ),
    Clash(
        "optimizer.type",
        lambda w: _one_bit(w) and _stage(w) > 0,
        lambda w: (
            f"{shown(w.facts['optimizer.type'])} and zero_optimization.stage {_stage(w)} don't go together: "
            "the compressed momentum must be whole on every rank"
        ),
        "use zero_optimization.stage 0, or another optimizer with compression.gradient_reduce",
    ),
    Clash(
        "amp.enabled",
        lambda w: w.facts.get("amp.enabled") is True and True in (w.facts.get("fp16.enabled"), w.facts.get("bf16.enabled")),
        lambda w: "amp and fp16 or bf16 are two answers to one question",
        "take amp out",
    ),
    Clash(
        "bf16.bf16_optimizer_states",
        lambda w: (
            w.facts.get("bf16.bf16_optimizer_states") is True and w.facts.get("bf16.bf16_master_weights_and_grads") is not True
        ),
        lambda w: "it needs bf16_master_weights_and_grads, as in DeepSpeed",
        "switch that on too",
    ),
    Clash(
        "data_types.param_dtype",
        lambda w: w.facts.get("data_types.param_dtype") in DTYPES and _differs(w),
        lambda w: f"{w.facts['data_types.param_dtype']} is not the dtype of the mode that is switched on",
        "leave it out: fp16 and bf16 say it",
    ),
)


def _differs(work: Work) -> bool:
    wanted = DTYPES[work.facts["data_types.param_dtype"]]
    on = next((n for n in ("fp16", "bf16") if work.facts.get(f"{n}.enabled") is True), "fp32")
    return wanted != DTYPES[on]


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def clashes(work: Work) -> Iterator[Clash]:
    """Those that hold."""
    return (clash for clash in CLASHES if clash.when(work))
