"""Configs and corpora for the data room's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from partita.config.schema import DataConfig, ModelConfig
from partita.data.corpus import Corpus, identity
from partita.data.hashing import key
from partita.data.loader import Data, Share
from partita.data.masking import make_masking
from partita.data.packing import Cutter
from partita.data.sampler import Order
from partita.data.tokenizer import BytesTokenizer
from partita.plan.plan import Schedule


@dataclass
class Config:
    """The nodes of the config that the data room reads."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0


@pytest.fixture
def config(tmp_path: Path):
    """Makes configs whose cache is a folder of the test."""

    def make(*, model_vocab: int | None = None, seed: int = 0, **data) -> Config:
        data.setdefault("cache", str(tmp_path / "cache"))
        return Config(DataConfig(**data), ModelConfig(vocab=model_vocab), seed)

    return make


def rows(samples: int, sequence: int, ahead: int = 1, starts: list[int] | None = None) -> Corpus:
    """A corpus of exactly `samples` samples, tokens 0, 1, 2, ... modulo 251."""
    tokens = (np.arange(samples * sequence + ahead) % 251).astype(np.uint16)
    return Corpus(tokens, None if starts is None else np.array(starts, np.int64), "rows", identity(tokens))


def _data_of(
    samples: int, schedule: Schedule, rank: int = 0, size: int = 1, *, sequence: int = 4, held: int = 0, **options
) -> Data:
    """Data over `rows`, without a config."""
    tokenizer = BytesTokenizer()
    masked, seed, threads = options.pop("masked", False), options.pop("seed", 0), options.pop("threads", 1)
    shuffle = options.pop("shuffle", True)

    def cutter(count: int, whole: bool) -> Cutter:
        masking = make_masking(0.3, tokenizer, key("test", seed), str(whole), 260) if masked else None
        corpus = rows(count, sequence, 0 if masked or not count else 1)
        return Cutter(corpus, tokenizer, sequence, 260, whole=whole, masking=masking, **options)

    train, validation = cutter(samples, True), cutter(held, False)
    return Data(train, validation, Order(len(train), seed, shuffle), schedule, Share(rank, size), threads)


@pytest.fixture(scope="session")
def data_of() -> Callable[..., Data]:
    """Makes data over `rows`; of the session, so that property tests may use it."""
    return _data_of
