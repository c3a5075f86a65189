"""Masked language modelling (Devlin et al. 2018, section 3.1): of the chosen tokens 80 % are masked, 10 % replaced, 10 % kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from partita.data.hashing import grid, key, uniform
from partita.data.tokenizer import Tokenizer
from partita.errors import ConfigError

Block = NDArray[np.int64]

_IGNORED = -100


@dataclass(frozen=True)
class Masking:
    """Chooses and replaces tokens by (seed, stream, sample number, position) only, so no layout changes what is masked."""

    share: float
    mask: int
    special: tuple[int, ...]
    vocab: int
    seed: int
    stream: str
    _keys: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        keys = tuple(key("mask", self.seed, self.stream, use) for use in ("choose", "action", "word"))
        object.__setattr__(self, "_keys", keys)

    def apply(self, tokens: Block, present: NDArray[np.bool_], sample: NDArray[np.int64]) -> tuple[Block, Block]:
        """Inputs and labels [B, T]. Special and absent tokens are never chosen; every row with an ordinary token has a label."""
        columns = tokens.shape[1]
        choose, action, word = (grid(k, sample, columns) for k in self._keys)
        score = uniform(choose)
        score[~present | np.isin(tokens, self.special)] = 2.0
        chosen = score < self.share
        least = score.argmin(axis=1)  # short rows would often have none, and a mean over nothing is no number
        rows = np.arange(len(tokens))
        chosen[rows, least] |= score[rows, least] < 1.0
        labels = np.where(chosen, tokens, _IGNORED)
        what = uniform(action)
        drawn = (word % np.uint64(self.vocab)).astype(np.int64)
        drawn = np.where(np.isin(drawn, self.special), tokens, drawn)
        inputs = np.where(chosen & (what < 0.8), self.mask, np.where(chosen & (what < 0.9), drawn, tokens))
        return inputs, labels


def make_masking(share: float, tokenizer: Tokenizer, seed: int, stream: str, vocab: int) -> Masking:
    """Masking with the tokenizer's mask token. Raises ConfigError where it has none, or the share is none."""
    if not 0.0 < share < 1.0:
        raise ConfigError(f"data.mask: {share} is not a share\n    -> between 0 and 1, e.g. 0.15")
    if tokenizer.mask is None:
        raise ConfigError(
            "data.tokenizer: a masked language model needs a mask token ([MASK], <mask> or <|mask|>), "
            "and this tokenizer has none\n    -> data.tokenizer=bytes or bpe"
        )
    return Masking(share, tokenizer.mask, tokenizer.special, min(vocab, tokenizer.vocab_size), seed, stream)
