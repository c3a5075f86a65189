"""From a corpus to batches: samples cut from the row of tokens, labels, documents and positions. No Python loop over tokens.

Sample j of a causal corpus reads tokens [j T, j T + T]: T inputs and, one further, T labels, so every token but the first is
predicted exactly once. A masked corpus reads [j T, j T + T - 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from partita.data.corpus import Corpus
from partita.data.masking import Masking
from partita.data.tokenizer import Tokenizer
from partita.errors import ConfigError, PartitaError

IGNORED = -100  # label that no loss counts
CAUSAL, MASKED = "causal", "masked"

Batch = dict[str, torch.Tensor]
Block = NDArray[np.int64]


@dataclass(frozen=True)
class Cutter:
    """Cuts samples of `sequence` tokens from a corpus and makes batches of them.

    whole: only samples with all their tokens (training); else the last one may be short, its missing labels ignored (validation).
    vocab: ids at or above it end the run. masking: for the objective `masked`.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    sequence: int
    vocab: int
    pack: bool = False
    whole: bool = True
    masking: Masking | None = None

    def __post_init__(self) -> None:
        if self.pack and self.corpus.starts is None and self.tokenizer.eos is None:
            raise ConfigError(
                f"data.pack: nothing tells where the documents of {self.corpus.where} end "
                "(no index, and the tokenizer has no end token)\n"
                "    -> data.pack=false, Megatron files, or a tokenizer with an end token"
            )

    @property
    def reach(self) -> int:
        """Tokens that a sample reads."""
        return self.sequence + (self.masking is None)

    def __len__(self) -> int:
        """Number of samples."""
        total, ahead = self.corpus.tokens.size, self.reach - self.sequence
        usable = max(total - ahead, 0)
        return usable // self.sequence if self.whole else -(-usable // self.sequence)

    def batch(self, indices: NDArray[np.int64], sample: NDArray[np.int64]) -> Batch:
        """The samples `indices` [B] (-1: an empty one, all labels ignored) numbered `sample` [B], as int64 tensors.

        input_ids, labels [B, T]; sample [B]; where documents are kept apart: positions, documents [B, T].
        """
        block, lengths = self._read(indices)
        documents = self._documents(indices, block) if self.pack else None
        learnt = self._learnt(indices)
        if self.masking is None:
            inputs, labels = self._shifted(block, lengths, documents)
            if learnt is not None:
                labels[~learnt[:, 1:]] = IGNORED
        else:
            inputs, labels = self._masked(block, lengths, sample, learnt)
        out = {"input_ids": inputs, "labels": labels, "sample": np.ascontiguousarray(sample)}
        if documents is not None:
            kept = np.ascontiguousarray(documents[:, : self.sequence])
            out |= {"positions": restart(kept), "documents": kept}
        return {name: torch.from_numpy(value) for name, value in out.items()}

    def _read(self, indices: NDArray[np.int64]) -> tuple[Block, NDArray[np.int64]]:
        """Tokens [B, reach] and how many of each row are there; the rest is the end token (or 0)."""
        filler = 0 if self.tokenizer.eos is None or self.tokenizer.eos >= self.vocab else self.tokenizer.eos
        block = np.full((indices.size, self.reach), filler, np.int64)
        lengths = np.zeros(indices.size, np.int64)
        for row, index in enumerate(indices.tolist()):
            if index >= 0:
                part = self.corpus.tokens[index * self.sequence : index * self.sequence + self.reach]
                block[row, : part.size] = part
                lengths[row] = part.size
        self._check(block)
        return block, lengths

    def _learnt(self, indices: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which tokens [B, reach] are to be predicted; None: all."""
        if self.corpus.learnt is None:
            return None
        out = np.zeros((indices.size, self.reach), bool)
        for row, index in enumerate(indices.tolist()):
            if index >= 0:
                part = self.corpus.learnt[index * self.sequence : index * self.sequence + self.reach]
                out[row, : part.size] = part != 0
        return out

    def _check(self, block: Block) -> None:
        # An id outside the embedding is a crash without a message on an accelerator.
        if block.size and (block.max() >= self.vocab or block.min() < 0):
            bad = block.max() if block.max() >= self.vocab else block.min()
            raise PartitaError(
                f"data.path: {self.corpus.where} holds the token id {bad}, outside the vocabulary of {self.vocab}\n"
                "    -> raise model.vocab, or correct data.tokenizer or data.dtype"
            )

    def _documents(self, indices: NDArray[np.int64], block: Block) -> Block:
        """Number of the document, from 0 in each row, that each token [B, reach] belongs to."""
        if self.corpus.starts is None:
            ended = block[:, :-1] == self.tokenizer.eos
            return np.pad(np.cumsum(ended, axis=1, dtype=np.int64), ((0, 0), (1, 0)))
        places = np.maximum(indices, 0)[:, None] * self.sequence + np.arange(self.reach)
        numbers = np.searchsorted(self.corpus.starts, places, "right")
        return (numbers - numbers[:, :1]).astype(np.int64)

    def _shifted(self, block: Block, lengths: NDArray[np.int64], documents: Block | None) -> tuple[Block, Block]:
        """Inputs and labels [B, T] of a causal model: each token predicts the next one of its document."""
        inputs, labels = block[:, :-1].copy(), block[:, 1:].copy()  # of one row a slice is contiguous: it would be shared
        labels[np.arange(self.sequence) >= lengths[:, None] - 1] = IGNORED
        if documents is not None:
            labels[documents[:, 1:] != documents[:, :-1]] = IGNORED
        return inputs, labels

    def _masked(
        self, block: Block, lengths: NDArray[np.int64], sample: NDArray[np.int64], learnt: NDArray[np.bool_] | None
    ) -> tuple[Block, Block]:
        assert self.masking is not None
        present = np.arange(self.sequence) < lengths[:, None]
        if learnt is not None:
            present &= learnt
        return self.masking.apply(block, present, sample)


def restart(documents: Block) -> Block:
    """Positions [B, T] that begin at 0 with each document."""
    columns = np.arange(documents.shape[1])
    begins = np.zeros_like(documents, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
