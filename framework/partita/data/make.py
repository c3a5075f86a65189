"""Puts the data of a run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partita.data.corpus import TRAIN, VALIDATION, Corpus
from partita.data.loader import Data, Share
from partita.data.masking import make_masking
from partita.data.packing import CAUSAL, MASKED, Cutter
from partita.data.sampler import Order
from partita.data.tokenizer import Tokenizer, vocab_size
from partita.errors import ConfigError, PartitaError
from partita.plan.plan import Schedule

CorpusBuilder = Callable[[Any, Tokenizer, str], Corpus]


def make_data(
    config: Any,
    schedule: Schedule,
    data_rank: int,
    data_size: int,
    tokenizer: Tokenizer,
    corpus: CorpusBuilder,
    objective: str = CAUSAL,
) -> Data:
    """The data of rank `data_rank` of `data_size` ranks that see different samples.

    config: the whole plain config (`data`, `model`, `seed` are read). corpus: the builder that the slot `corpus` gives.
    objective: `causal` (labels are the next tokens) or `masked`. All ranks may call it at once: one fills the cache.
    Raises ConfigError for values that can't be used, PartitaError for files that can't, both naming key or path.
    """
    if objective not in (CAUSAL, MASKED):
        raise ConfigError(f"the model's partita_loss is {objective!r}\n    -> {CAUSAL} or {MASKED}")
    if config.data.sequence < 1 or config.data.workers < 0:
        raise ConfigError(f"data.sequence={config.data.sequence}, data.workers={config.data.workers}\n    -> at least 1 and 0")
    train = _cutter(config, tokenizer, corpus, TRAIN, objective)
    validation = _cutter(config, tokenizer, corpus, VALIDATION, objective)
    if not len(train):
        raise PartitaError(
            f"data.path: {train.corpus.where} has {train.corpus.tokens.size} tokens for training, "
            f"fewer than one sample of {train.reach}\n"
            "    -> a smaller data.sequence or data.validation, or more text"
        )
    order = Order(len(train), config.seed, config.data.shuffle)
    return Data(train, validation, order, schedule, Share(data_rank, data_size), config.data.workers)


def _cutter(config: Any, tokenizer: Tokenizer, corpus: CorpusBuilder, split: str, objective: str) -> Cutter:
    vocab = vocab_size(config, tokenizer.vocab_size)
    masking = make_masking(config.data.mask, tokenizer, config.seed, split, vocab) if objective == MASKED else None
    return Cutter(
        corpus=corpus(config, tokenizer, split),
        tokenizer=tokenizer,
        sequence=config.data.sequence,
        vocab=vocab,
        pack=config.data.pack,
        whole=split == TRAIN,
        masking=masking,
    )
