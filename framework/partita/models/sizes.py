"""The sizes of a reference model, read from the config once and checked there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partita.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Sizes:
    """Counts, except: dropout is a probability, std a standard deviation, rope_base the base of rotary positions.

    ffn: inner size of the feed-forward. context: longest sequence. kv_heads: heads of keys and values.
    """

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    tie: bool
    dropout: float
    std: float
    rope_base: float

    @property
    def head(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads


def read_sizes(config: Any, vocab: int, *, rotary: bool = False) -> Sizes:
    """Sizes from `config.model` and `config.data.sequence`. rotary: grouped heads and rotary positions are the model's (Llama).

    Raises ConfigError naming all keys that don't fit, or that this model would not read.
    """
    m = config.model
    problems = [*_counts(m), *_unread(m, rotary)]
    context = m.context or config.data.sequence
    if context < config.data.sequence:
        problems.append(
            f"model.context: {context} positions, but data.sequence={config.data.sequence}\n    -> raise it or leave it out"
        )
    if not problems:
        problems = _divisions(m, rotary)
    if problems:
        raise ConfigError("\n".join(problems))
    return Sizes(
        vocab=vocab,
        layers=m.layers,
        width=m.width,
        heads=m.heads,
        kv_heads=m.kv_heads or m.heads,
        ffn=ffn_size(m, gated=rotary),
        context=context,
        tie=m.tie_embeddings,
        dropout=m.dropout,
        std=m.init_std,
        rope_base=getattr(m, "rope_base", 10000.0),
    )


def ffn_size(m: Any, *, gated: bool) -> int:
    """Inner size of the feed-forward of a node `model`: 4 x width; with a gate 8/3 x width, rounded up to a multiple of 64.

    The latter gives three matrices as many weights as two of the former (Shazeer 2020).
    """
    return int(m.ffn or (-(-8 * m.width // (3 * 64)) * 64 if gated else 4 * m.width))


def _counts(m: Any) -> list[str]:
    problems = []
    for key in ("layers", "width", "heads", "kv_heads", "ffn", "context"):
        value = getattr(m, key)
        if value is not None and value < 1:
            problems.append(f"model.{key}: {value}\n    -> at least 1")
    if not 0.0 <= m.dropout < 1.0:
        problems.append(f"model.dropout: {m.dropout} is no probability below 1\n    -> e.g. 0.1")
    if m.init_std < 0:
        problems.append(f"model.init_std: {m.init_std} is negative\n    -> e.g. 0.02")
    return problems


def _unread(m: Any, rotary: bool) -> list[str]:
    """Keys that are set and that this model has no use for."""
    problems = [f"model.options.{key}: {m.name} has no such option\n    -> {did_you_mean(key, vars(m))}" for key in m.options]
    if getattr(m, "path", None) is not None:
        problems.append(f"model.path: {m.name} is built from its sizes\n    -> model=hf, or leave it out")
    if rotary:
        return problems
    if m.kv_heads not in (None, m.heads):
        problems.append(
            f"model.kv_heads: {m.name} has as many key/value heads as heads ({m.heads})\n    -> model=llama, or leave it out"
        )
    if getattr(m, "rope_base", 10000.0) != 10000.0:
        problems.append(f"model.rope_base: {m.name} learns its positions\n    -> model=llama, or leave it out")
    return problems


def _divisions(m: Any, rotary: bool) -> list[str]:
    problems = []
    if m.width % m.heads:
        fits = [h for h in range(1, m.width + 1) if m.width % h == 0]
        nearest = min(fits, key=lambda h: abs(h - m.heads))
        problems.append(f"model.heads: {m.heads} doesn't divide model.width={m.width}\n    -> e.g. model.heads={nearest}")
    elif rotary and (m.width // m.heads) % 2:
        problems.append(
            f"model.heads: rotary positions turn pairs of channels, and a head has {m.width // m.heads}\n    -> an even number"
        )
    if m.heads % (m.kv_heads or m.heads):
        problems.append(f"model.kv_heads: {m.kv_heads} doesn't divide model.heads={m.heads}\n    -> a divisor, or leave it out")
    return problems
