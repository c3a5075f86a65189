"""The sections optimizer and scheduler: names, parameters with DeepSpeed's own defaults, and what can't be said in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partita.config.deepspeed.rules import (
    AUTO,
    Deny,
    Drop,
    Rule,
    Take,
    WrongValue,
    amount,
    anything,
    betas,
    boolean,
    count,
    dropped,
    number,
    shown,
    size,
    text,
    words,
)
from partita.errors import nearest

if TYPE_CHECKING:
    from partita.config.deepspeed.walk import Work

_AUTO = "the command line's value, else Partita's default"
_FUSED = "the update is one fused pass"


def _only(kind: Callable[[Any], Any], value: Any, why: str) -> Rule:
    return Rule(kind, Deny(why, "leave it out", unless=(value, None)))


_COMMON: dict[str, Rule] = {
    "lr": Rule(amount, Take("optimizer.lr"), auto=_AUTO, default=1e-3),
    "weight_decay": Rule(amount, Take("optimizer.weight_decay"), auto=_AUTO, default=0.0),
    "max_grad_norm": Rule(anything, Deny("DeepSpeed refuses it here", "write gradient_clipping at the top level")),
    **dropped({boolean: ["fused", "foreach", "capturable", "differentiable", "torch_adam", "set_grad_none"]}, _FUSED),
    "maximize": _only(boolean, False, "a loss is minimised"),
}
_ADAM = {
    **_COMMON,
    "betas": Rule(betas, Take("optimizer.betas"), auto=_AUTO, default=[0.9, 0.999]),
    "eps": Rule(amount, Take("optimizer.eps"), auto=_AUTO, default=1e-8),
    "adam_w_mode": Rule(boolean, Drop("optimizer.name says it")),
    "bias_correction": _only(boolean, True, "moments are always corrected for their start at zero"),
    "amsgrad": _only(boolean, False, "the largest second moment is not kept"),
    "fp32_optimizer_states": _only(boolean, True, "moments are in precision.optimizer, which bf16.bf16_optimizer_states changes"),
}
_ONE_BIT = {
    **_ADAM,
    "freeze_step": Rule(size, Take("optimizer.options.freeze_step"), default=100000),
    **dropped({boolean: ["cuda_aware"], text: ["comm_backend_name"]}, "collectives are those of the mesh"),
}
_LAMB = {
    **_ADAM,
    "max_coeff": Rule(amount, Take("optimizer.options.max_coeff"), default=10.0),
    "min_coeff": Rule(amount, Take("optimizer.options.min_coeff"), default=0.01),
}
_SGD = {
    **_COMMON,
    "momentum": Rule(amount, Take("optimizer.momentum"), default=0.0),
    "nesterov": Rule(boolean, Take("optimizer.nesterov"), default=False),
    "dampening": _only(number, 0.0, "momentum is not dampened"),
}


def _options(keys: Mapping[str, tuple[Callable[[Any], Any], Any]]) -> dict[str, Rule]:
    return {key: Rule(kind, Take(f"optimizer.options.{key}"), default=default) for key, (kind, default) in keys.items()}


@dataclass(frozen=True)
class Kind:
    """An optimizer: our name, and the rules of its parameters."""

    name: str
    params: Mapping[str, Rule] = field(default_factory=dict)


OPTIMIZERS: dict[str, Kind] = {
    "adam": Kind("adamw", _ADAM),  # adam_w_mode is true unless the file says otherwise
    "adamw": Kind("adamw", _ADAM),
    "sgd": Kind("sgd", _SGD),
    "adagrad": Kind("adagrad", {**_COMMON, "eps": Rule(amount, Take("optimizer.eps"), auto=_AUTO, default=1e-10)}),
    "lion": Kind("lion", {**_COMMON, "betas": Rule(betas, Take("optimizer.betas"), auto=_AUTO, default=[0.9, 0.99])}),
    "lamb": Kind("lamb", _LAMB),
    "muon": Kind(
        "muon",
        {
            **_ADAM,
            "momentum": Rule(amount, Take("optimizer.momentum"), default=0.95),
            **_options({"muon_lr": (amount, None), "adam_lr": (amount, None), "ns_method": (text, None)}),
        },
    ),
    "onebitadam": Kind("onebit_adam", _ONE_BIT),
    "zerooneadam": Kind(
        "zero_one_adam",
        {
            **_ADAM,
            **_options({
                "var_freeze_step": (size, 100000), "var_update_scaler": (size, 16), "local_step_scaler": (size, 32678),
                "local_step_clipper": (size, 16),
            }),
            **dropped({boolean: ["cuda_aware"], text: ["comm_backend_name"]}, "collectives are those of the mesh"),
        },
    ),
    "onebitlamb": Kind(
        "onebit_lamb",
        {
            **_ONE_BIT, **_LAMB,
            **_options({
                "coeff_beta": (amount, 0.9), "factor_max": (amount, 4.0), "factor_min": (amount, 0.5), "factor_threshold": (amount, 0.1),
            }),
        },
    ),
    "muadam": Kind("muadam", _ADAM),
    "muadamw": Kind("muadamw", _ADAM),
    "musgd": Kind("musgd", _SGD),
}  # fmt: skip

_TYPE, _PARAMS = "optimizer.type", "optimizer.params"


def optimizer(work: Work) -> None:
    """The section optimizer. Defaults that the file leaves out are DeepSpeed's, so that the numbers are."""
    section = work.block("optimizer", ("type", "params", "legacy_fusion"))
    if section is None:
        return
    if "legacy_fusion" in section:
        work.drop("optimizer.legacy_fusion", _FUSED)
    name = section.get("type")
    params = work.block(_PARAMS, None) or {}
    if name is None:
        _without_type(work, params)
        return
    kind = OPTIMIZERS.get(str(name).lower())
    if kind is None:
        near = nearest(str(name).lower(), OPTIMIZERS)
        work.deny(_TYPE, f"there is no optimizer {shown(name)}", f"use {' or '.join(near) if near else 'Adam, AdamW or SGD'}")
        _idle(work, params, kind)
        return
    ours = "adam" if str(name).lower() == "adam" and params.get("adam_w_mode") in (False, "false") else kind.name
    if str(name).lower() == "adamw" and params.get("adam_w_mode") in (False, "false"):
        work.deny(
            f"{_PARAMS}.adam_w_mode", "AdamW is decoupled whatever adam_w_mode says; DeepSpeed ignores it", 'use type "Adam"'
        )
    if not work.known("optimizer.name", ours):
        work.deny(_TYPE, f"no plug-in provides the update rule {ours!r}", f"use one of {work.names('optimizer.name')}")
        _idle(work, params, kind)
        return
    work.take(_TYPE, "optimizer.name", ours)
    work.values["optimizer.decay_1d"] = True
    work.fill("weight decay", "optimizer.decay_1d", True, "DeepSpeed decays vectors too")
    work.apply(_PARAMS, params, kind.params)
    if not work.section_given("scheduler"):
        work.fill("scheduler", "lr_schedule.name", "constant", "no scheduler in the file: the rate stays")
        work.fill("scheduler", "lr_schedule.warmup", 0, "no scheduler in the file: the rate stays")


def _without_type(work: Work, params: Mapping[str, Any]) -> None:
    if params:
        work.deny(_TYPE, "optimizer.params without optimizer.type have no effect", 'write a type: "AdamW"')
        _idle(work, params, None)
    else:
        work.drop(_TYPE, "no type: optimizer= of the command line")


def _idle(work: Work, params: Mapping[str, Any], kind: Kind | None) -> None:
    for key in params:
        work.drop(f"{_PARAMS}.{key}", "of an optimizer that is refused")


# ------------------------------------------------------------------ schedules


def _of_peak(value: Any, work: Work) -> float:
    """An absolute rate as a factor on optimizer.lr."""
    peak = work.values.get("optimizer.lr", work.current("optimizer.lr"))
    return float(value) / float(peak) if peak else 0.0


_WARMUP = {
    "warmup_min_lr": Rule(amount, Take("start"), auto="0"),
    "warmup_max_lr": Rule(amount, Take("peak"), auto="optimizer.params.lr"),
    "warmup_num_steps": Rule(size, Take("warmup"), auto="lr_schedule.warmup", default=1000),
    "warmup_type": Rule(words("log", "linear"), Take("shape"), default="log"),
    "last_batch_iteration": _only(lambda v: int(number(v)), -1, "where a run goes on is in its checkpoint"),
}
_TOTAL = {"total_num_steps": Rule(count, Take("total"), auto="train.steps")}
SCHEDULERS: dict[str, Kind] = {
    "warmuplr": Kind("warmup", _WARMUP),
    "warmupdecaylr": Kind("warmup_decay", {**_WARMUP, **_TOTAL, "warmup_max_lr": Rule(amount, Take("peak"), auto="optimizer.params.lr", default=1e-3)}),
    "warmupcosinelr": Kind("warmup_cosine", {
        **{k: v for k, v in _WARMUP.items() if not k.endswith("_lr")}, **_TOTAL,
        "warmup_min_ratio": Rule(amount, Take("start"), default=0.0), "cos_min_ratio": Rule(amount, Take("end"), default=1e-4)}),
    "onecycle": Kind("one_cycle", {
        "cycle_min_lr": Rule(amount, Take("low")), "cycle_max_lr": Rule(amount, Take("peak")),
        "decay_lr_rate": Rule(amount, Take("decay_rate"), default=0.0), "decay_step_size": Rule(size, Take("decay_steps"), default=0),
        "cycle_first_step_size": Rule(count, Take("first"), default=2000), "cycle_second_step_size": Rule(count, Take("second")),
        "cycle_first_stair_count": Rule(size, Take("first_stairs"), default=0),
        "cycle_second_stair_count": Rule(size, Take("second_stairs")),
        "cycle_momentum": _only(boolean, False, "betas stay what they are over the cycle"),
        **dropped({amount: ["cycle_min_mom", "cycle_max_mom", "decay_mom_rate"]}, "betas stay what they are over the cycle")}),
    "lrrangetest": Kind("range_test", {
        "lr_range_test_min_lr": Rule(amount, Take("peak"), default=1e-3),
        "lr_range_test_step_size": Rule(count, Take("interval"), default=2000),
        "lr_range_test_step_rate": Rule(amount, Take("rate"), default=1.0),
        "lr_range_test_staircase": Rule(boolean, Take("staircase"), default=False)}),
}  # fmt: skip
_SCHEDULER = "scheduler.params"


def scheduler(work: Work) -> None:
    """The section scheduler. Rates become factors on optimizer.lr, the peak becomes optimizer.lr."""
    section = work.block("scheduler", ("type", "params"))
    if section is None:
        return
    name, params = section.get("type"), work.block(_SCHEDULER, None) or {}
    kind = SCHEDULERS.get(str(name).lower()) if name is not None else None
    if kind is None:
        near = nearest(str(name).lower(), SCHEDULERS) or list(SCHEDULERS)
        reason = f"there is no scheduler {shown(name)}" if name is not None else "a scheduler without type"
        work.deny("scheduler.type", reason, f"use {' or '.join(near)}, or lr_schedule= of the command line")
        for key in params:
            work.drop(f"{_SCHEDULER}.{key}", "of a scheduler that is refused")
        return
    work.take("scheduler.type", "lr_schedule.name", kind.name)
    found = _converted(work, params, kind)
    if kind.name == "one_cycle" and params.get("cycle_momentum", True) not in (False, "false"):
        work.deny(
            f"{_SCHEDULER}.cycle_momentum",
            "betas stay what they are over the cycle, and DeepSpeed would cycle them",
            "write false",
        )
    _place(work, kind, found)


def _converted(work: Work, params: Mapping[str, Any], kind: Kind) -> dict[str, tuple[str, Any]]:
    """Option -> (their key, value), with what isn't taken told already."""
    out: dict[str, tuple[str, Any]] = {}
    for key, rule in kind.params.items():
        path = f"{_SCHEDULER}.{key}"
        if key not in params:
            if rule.default is not None and isinstance(rule.then, Take):
                out[rule.then.key] = (path, rule.default)
                if rule.then.key != "peak":
                    work.fill(path, _key(rule.then.key), rule.default, "DeepSpeed's default")
            continue
        value = params[key]
        if value is None:
            work.drop(path, "null: as if left out")
        elif value == AUTO and rule.auto:
            work.fill(path, "", None, rule.auto)
        else:
            try:
                converted = rule.kind(value)
            except WrongValue as wanted:
                work.wrong(path, value, wanted)
                continue
            if isinstance(rule.then, Take):
                out[rule.then.key] = (path, converted)
            else:
                work.outcome(path, converted, rule.then)
    work.unknown(_SCHEDULER, params, kind.params)
    return out


def _place(work: Work, kind: Kind, found: dict[str, tuple[str, Any]]) -> None:
    if "peak" in found:
        path, peak = found.pop("peak")
        work.overrule("optimizer.lr", "the scheduler sets the rate, in DeepSpeed too")
        work.take(path, "optimizer.lr", peak, "the peak of the schedule")
        work.values["optimizer.lr"] = peak
    for option in ("start", "low"):
        if option in found and kind.name != "warmup_cosine":
            path, value = found[option]
            found[option] = (path, _of_peak(value, work))
    for option, (path, value) in found.items():
        key = _key(option)
        work.take(path, key, value)
        work.values[key] = value


def _key(option: str) -> str:
    return "lr_schedule.warmup" if option == "warmup" else f"lr_schedule.options.{option}"
