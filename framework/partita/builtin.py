"""The core's own plug-in: reference models, corpora, tokenizers, schedules, losses and update rules, through the same hooks as anyone's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from partita.plugin.markers import hookimpl

partita_api = 1

# slot -> name -> "module:attribute"; imported when asked for
PROVIDED: dict[str, dict[str, str]] = {
    "model": {
        "gpt": "partita.models.gpt:make_gpt",
        "llama": "partita.models.llama:make_llama",
        "bert": "partita.models.bert:make_bert",
        "hf": "partita.models.hf:make_hf",
    },
    "corpus": {
        "stdlib": "partita.data.corpus:make_stdlib",
        "text": "partita.data.corpus:make_text",
        "tokens": "partita.data.corpus:make_tokens",
        "hf": "partita.data.corpus:make_hf",
        "sft": "partita.data.tuning:make_sft",
        "synthetic": "partita.data.corpus:make_synthetic",
    },
    "tokenizer": {
        "bytes": "partita.data.tokenizer:make_bytes",
        "bpe": "partita.data.tokenizer:make_bpe",
        "ids": "partita.data.tokenizer:make_ids",
    },
    "lr_schedule": {
        **{name: f"partita.train.schedules:make_{name}" for name in ("constant", "linear", "cosine", "wsd", "inverse_sqrt")},
        **{
            name: f"partita.train.counted_schedules:make_{name}"
            for name in ("warmup", "warmup_decay", "warmup_cosine", "one_cycle", "range_test")
        },
    },
    "kernel": {"liger": "partita.train.liger:make_liger"},
    "loss": {"causal": "partita.train.loss:causal", "masked": "partita.train.loss:masked"},
    "optimizer": {name: f"partita.state.optimizers:make_{name}" for name in ("adamw", "adam", "sgd", "lion", "adamw8bit")}
    | {name: f"partita.state.rules.{name}:make_{name}" for name in ("adagrad", "lamb", "adafactor", "muon")}
    | {name: f"partita.state.rules.torchao:make_{name}" for name in ("torchao_adamw8bit", "torchao_adamw4bit")},
    "executor": {"none": "partita.train.step:PlainExecutor"},
    "collective": {"default": "partita.runtime.collectives:make_collectives"},
}


@hookimpl
def partita_slots() -> dict[str, Sequence[str]]:
    """All names of the table."""
    return {slot: tuple(names) for slot, names in PROVIDED.items()}


@hookimpl
def partita_provide(slot: str, name: str) -> Any:
    """The builder behind a name."""
    target = PROVIDED.get(slot, {}).get(name)
    if target is None:
        return None
    module, attribute = target.split(":")
    builder: Callable[..., Any] = getattr(import_module(module), attribute)
    return builder
