"""Values of the core's nodes: ranges, names and what must fit together. Types are the schema's affair, plans the planner's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from partita.errors import nearest
from partita.plan.problems import Problem

COUNTS = (  # whole numbers of at least 1, where they are given
    "model.layers",
    "model.width",
    "model.heads",
    "model.kv_heads",
    "model.ffn",
    "model.vocab",
    "model.context",
    "data.vocab",
    "data.sequence",
    "data.workers",
    "data.limit",
    "launch.min_ranks",
    "train.steps",
    "train.log_every",
    "train.keep",
    "cluster.nodes",
    "cluster.devices_per_node",
)
NOT_NEGATIVE = (
    "seed",
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "launch.restarts",
    "launch.cooldown",
    "train.grad_clip",
    "train.z_loss",
    "train.eval_every",
    "train.eval_batches",
    "train.mtbf",
    "train.keep_best",
    "train.sample",
    "lr_schedule.minimum",
    "lr_schedule.warmup",
    "lr_schedule.decay",
)
POSITIVE = (
    "model.init_std",
    "model.rope_base",
    "launch.timeout",
    "launch.grace",
    "train.peak_flops",
    "cluster.memory",
    "cluster.host_memory",
    "cluster.flops",
    "cluster.intra_bandwidth",
    "cluster.inter_bandwidth",
    "cluster.intra_latency",
    "cluster.inter_latency",
    "cluster.memory_bandwidth",
    "cluster.host_bandwidth",
    "cluster.file_bandwidth",
)
SHARES = {  # key -> whether 1 itself is allowed
    "model.dropout": False,
    "data.validation": False,
    "data.mask": True,
    "train.label_smoothing": False,
    "optimizer.momentum": False,
    "lr_schedule.minimum": True,
}
WORDS = {
    "launch.log_level": ("debug", "info", "warning", "error"),
    "model.weights": ("auto", "load", "random"),
    "data.format": ("auto", "megatron", "raw"),
    "data.dtype": ("auto", "uint16", "uint32", "int32"),
    "train.on_nonfinite": ("stop", "skip"),
    "train.on_save_error": ("stop", "warn"),
}
COUNT_OR_AUTO = ("launch.ranks", "launch.threads", "train.micro_batch", "train.global_batch")
SLOTS = {
    "model.name": "model",
    "data.name": "corpus",
    "optimizer.name": "optimizer",
    "lr_schedule.name": "lr_schedule",
    "train.loss": "loss",
}
COUNTED = ("warmup", "warmup_decay", "warmup_cosine", "one_cycle", "range_test")  # a warm-up may be longer than the run there
NEEDS_PATH = {"text": "text files", "tokens": "token files", "hf": "a dataset on disk", "sft": "conversations"}


def check_config(config: Any, slots: Mapping[str, Mapping[str, str]], together: bool = True) -> list[Problem]:
    """All problems of a plain config. `slots`: slot -> names (`Registry.slots`). together=False: only values by themselves."""
    problems = [*_ranges(config), *_words(config), *_names(config, slots)]
    broken = {p.key for p in problems}
    if together:
        problems += [p for p in _together(config) if p.key not in broken]
    return problems


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _ranges(config: Any) -> Iterator[Problem]:
    for key in COUNTS:
        value = _get(config, key)
        if value is not None and value < 1:
            yield Problem(key, f"{value} is less than 1", "give a whole number of at least 1")
    for key in NOT_NEGATIVE:
        value = _get(config, key)
        if value is not None and not value >= 0:
            yield Problem(key, f"{value} is not a number of at least 0", "give 0 or more")
    for key in POSITIVE:
        value = _get(config, key)
        if value is not None and not value > 0:
            yield Problem(key, f"{value} is not more than 0", "give a number above 0")
    for key, whole in SHARES.items():
        value = _get(config, key)
        if (value >= 0 and (value > 1 or (value == 1 and not whole))) or (value < 0 and key not in NOT_NEGATIVE):
            yield Problem(key, f"{value} is no share", f"give a number from 0 to 1{'' if whole else ', less than 1'}")
    yield from _betas(config.optimizer.betas)


def _betas(betas: list[float]) -> Iterator[Problem]:
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        yield Problem(
            "optimizer.betas",
            f"{betas} is not two decay rates",
            "give two numbers from 0 to 1, less than 1: 'optimizer.betas=[0.9,0.95]'",
        )


def _words(config: Any) -> Iterator[Problem]:
    for key, known in WORDS.items():
        value = _get(config, key)
        if value not in known:
            yield Problem(key, f"{value!r} is not a choice", _choices(value, known))
    for key in COUNT_OR_AUTO:
        value = _get(config, key)
        if value != "auto" and (not isinstance(value, int) or value < 1):
            yield Problem(key, f"{value!r} is neither a count nor auto", "give a whole number of at least 1, or auto")
    every = config.train.save_every
    if every != "auto" and (not isinstance(every, int) or every < 0):
        yield Problem("train.save_every", f"{every!r} is neither a count nor auto", "give 0 or more steps, or auto")
    if every == "auto" and not config.train.mtbf:
        reason = "the best interval depends on how often the run fails"
        yield Problem("train.mtbf", reason, "give the mean seconds between failures, or train.save_every=<steps>")


def _choices(value: Any, known: Any) -> str:
    near = nearest(str(value), known)
    return (f"Did you mean {' or '.join(near)}? " if near else "") + f"There are: {', '.join(sorted(known))}"


def _names(config: Any, slots: Mapping[str, Mapping[str, str]]) -> Iterator[Problem]:
    """Names that a plug-in must provide."""
    yield from _tracker(config, slots.get("tracker", {}))
    for key, slot in SLOTS.items():
        value, known = _get(config, key), slots.get(slot)
        if known and value not in known and not (key == "train.loss" and value == "auto"):
            yield Problem(key, f"no plug-in provides the {slot} {value!r}", _choices(value, known))
    tokenizer, known = config.data.tokenizer, slots.get("tokenizer", {})
    if known and tokenizer not in known and not Path(tokenizer).exists():
        yield Problem(
            "data.tokenizer", f"{tokenizer!r} is neither a known tokenizer nor a path that exists", _choices(tokenizer, known)
        )


def _tracker(config: Any, known: Mapping[str, str]) -> Iterator[Problem]:
    """Each tracker brings names to one slot; the node is a plug-in's, and may not be there."""
    name = getattr(getattr(config, "tracker", None), "name", None)
    if known and isinstance(name, str) and name not in known:
        yield Problem("tracker.name", f"no plug-in provides the tracker {name!r}", _choices(name, known))


# ------------------------------------------------------------------ what must fit together


def _together(config: Any) -> Iterator[Problem]:
    yield from _model(config.model, config.data)
    yield from _data(config.data)
    yield from _train(config.train, config.lr_schedule)


def _model(model: Any, data: Any) -> Iterator[Problem]:
    if model.name == "hf":
        if model.path is None and "model_type" not in model.options:
            remedy = "give a folder with config.json: model.path=<folder>, or a type: +model.options.model_type=llama"
            yield Problem("model.path", "model=hf needs a model", remedy)
        elif model.path is not None and not Path(model.path).exists():
            yield Problem("model.path", f"{model.path!r} does not exist", "give a folder with config.json; nothing is downloaded")
        return
    if model.width > 0 and model.heads > 0 and model.width % model.heads:
        near = [h for h in range(1, model.width + 1) if model.width % h == 0 and abs(h - model.heads) <= model.heads]
        best = sorted(sorted(near, key=lambda h: abs(h - model.heads))[:4])
        yield Problem(
            "model.heads",
            f"{model.heads} heads don't divide model.width={model.width}",
            f"give one of {', '.join(map(str, best))}",
        )
    if model.kv_heads and model.kv_heads > 0 and model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads", f"{model.kv_heads} doesn't divide model.heads={model.heads}", "give a divisor of model.heads"
        )
    if model.context is not None and 0 < model.context < data.sequence:
        remedy = f"give at least {data.sequence}, or a shorter data.sequence"
        yield Problem("model.context", f"{model.context} is shorter than data.sequence={data.sequence}", remedy)


def _data(data: Any) -> Iterator[Problem]:
    if data.path is None and data.name in NEEDS_PATH:
        yield Problem(
            "data.path", f"data={data.name} needs {NEEDS_PATH[data.name]}", "give a file, folder or glob: data.path=<path>"
        )
    if data.path is not None and not _exists(data.path):
        yield Problem(
            "data.path",
            f"{data.path!r} matches no file",
            f"give a file, folder or glob that exists; it is looked up from {os.getcwd()}",
        )
    if data.tokenizer == "bpe" and 0 < data.vocab < 257:
        yield Problem(
            "data.vocab", f"{data.vocab} entries can't hold the 256 bytes and the end of a document", "give at least 257"
        )


def _exists(path: str) -> bool:
    import glob

    return os.path.exists(os.path.expanduser(path)) or bool(glob.glob(os.path.expanduser(path), recursive=True))


def _train(train: Any, schedule: Any) -> Iterator[Problem]:
    sizes = (train.micro_batch, train.global_batch)
    if all(isinstance(n, int) for n in sizes) and train.micro_batch > train.global_batch > 0:
        reason = f"{train.micro_batch} sequences are more than train.global_batch={train.global_batch}"
        yield Problem("train.micro_batch", reason, "give at most the global batch, or auto")
    for key in ("warmup", "decay"):
        value = getattr(schedule, key)
        used = (key == "warmup" and schedule.name not in COUNTED) or schedule.name == "wsd"
        if used and value > train.steps > 0:
            yield Problem(
                f"lr_schedule.{key}",
                f"{value} steps are more than train.steps={train.steps}",
                "give fewer steps, or a share below 1",
            )
    if train.resume not in ("auto", "never") and not Path(train.resume).exists():
        yield Problem(
            "train.resume",
            f"{train.resume!r} is neither auto nor never, and no such checkpoint exists",
            _resume_remedy(train.resume),
        )


def _resume_remedy(value: str) -> str:
    near = nearest(value, ("auto", "never"))
    return (
        f"Did you mean {near[0]}?" if near else "give auto, never, or the path of a checkpoint: <run>/checkpoints/step-00000010"
    )
