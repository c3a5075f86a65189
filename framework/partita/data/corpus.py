"""Corpora: long rows of tokens with the places where documents begin. Builders of the slot `corpus`.

Corpora made from text are tokenized once into the cache and memory-mapped, so that all ranks of a node share one copy in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.data import formats
from partita.data.cache import cache_dir, cached
from partita.data.hashing import digest, grid, key, sampled_crc
from partita.data.sources import Document, Source, hf_source, is_held, need_path, stdlib_source, text_source
from partita.data.tokenizer import Tokenizer, vocab_size
from partita.errors import ConfigError, PartitaError

TRAIN, VALIDATION = "train", "validation"
SYNTHETIC_TOKENS = 1 << 20

_FORMAT = 1  # of the cached files; raised when they change


@dataclass(frozen=True)
class Corpus:
    """Tokens [n] of one split, in any integer dtype, memory-mapped or not.

    starts: offset of each document's first token, rising, the first one 0; None where only end tokens tell.
    where: names the place in messages. identity: changes when the content does (checked on resume).
    learnt: which tokens [n] are predicted (nonzero); None: all.
    """

    tokens: NDArray[Any]
    starts: NDArray[np.int64] | None
    where: str
    identity: str
    learnt: NDArray[np.uint8] | None = None

    def part(self, low: int, high: int) -> Corpus:
        """Tokens `low` to `high` as a corpus."""
        starts = self.starts
        if starts is not None:
            inside = starts[np.searchsorted(starts, low, "right") : np.searchsorted(starts, high, "left")] - low
            starts = np.concatenate([np.zeros(1, np.int64), inside]) if high > low else inside[:0]
        learnt = None if self.learnt is None else self.learnt[low:high]
        return replace(
            self, tokens=self.tokens[low:high], starts=starts, identity=f"{self.identity}[{low}:{high}]", learnt=learnt
        )


def check_share(config: Any) -> float:
    """`data.validation`, a share from 0 up to but not including 1."""
    share = float(config.data.validation)
    if not 0.0 <= share < 1.0:
        raise ConfigError(f"data.validation: {share} is not a share\n    -> from 0 to less than 1; 0 for no validation")
    return share


def held_tail(corpus: Corpus, share: float, split: str) -> Corpus:
    """Splits by position: the last `share` of the tokens is for validation, cut at the document that begins nearest to there."""
    total = corpus.tokens.size
    cut = total - round(total * share)
    if corpus.starts is not None and corpus.starts.size > 1 and 0 < cut < total:
        inner = corpus.starts[1:]
        cut = int(inner[np.abs(inner - cut).argmin()])
    return corpus.part(0, cut) if split == TRAIN else corpus.part(cut, total)


# ------------------------------------------------------------------ from documents


def make_stdlib(config: Any, tokenizer: Tokenizer, split: str) -> Corpus:
    """The Python standard library's source text."""
    return _from_documents(config, tokenizer, split, stdlib_source(config))


def make_text(config: Any, tokenizer: Tokenizer, split: str) -> Corpus:
    """Text files at `data.path`."""
    return _from_documents(config, tokenizer, split, text_source(config))


def make_hf(config: Any, tokenizer: Tokenizer, split: str) -> Corpus:
    """A Hugging Face dataset on disk at `data.path`."""
    return _from_documents(config, tokenizer, split, hf_source(config))


def _from_documents(config: Any, tokenizer: Tokenizer, split: str, source: Source) -> Corpus:
    share = check_share(config)
    name = f"corpus-{digest(_FORMAT, source.key, tokenizer.fingerprint, tokenizer.vocab_size, share)}"
    entry = cached(cache_dir(config.data.cache), name, lambda folder: _tokenize(folder, source, tokenizer, share))
    parts = {side: _open(entry, side, source.where) for side in (TRAIN, VALIDATION)}
    empty = [side for side, part in parts.items() if not part.tokens.size]
    if share == 0.0 or not empty:
        return parts[split]
    # The hash put all documents on one side (there are few of them): the split is by position instead.
    whole = parts[VALIDATION if empty[0] == TRAIN else TRAIN]
    return held_tail(whole, share, split)


class _Writer:
    """Tokens of one split, appended to a file."""

    def __init__(self, folder: Path, side: str, dtype: np.dtype[Any]) -> None:
        self._file = (folder / f"{side}.bin").open("wb")
        self._folder, self._side, self._dtype = folder, side, dtype
        self._lengths: list[int] = []

    def add(self, ids: NDArray[Any], end: int | None) -> None:
        self._file.write(ids.astype(self._dtype).tobytes())
        if end is not None:
            self._file.write(np.array([end], self._dtype).tobytes())
        self._lengths.append(ids.size + (end is not None))

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def finish(self) -> None:
        """Writes where the documents begin."""
        ends = np.cumsum(np.array(self._lengths, np.int64))
        np.save(self._folder / f"{self._side}.starts.npy", ends - np.array(self._lengths, np.int64))


def _tokenize(folder: Path, source: Source, tokenizer: Tokenizer, share: float) -> None:
    """Writes both splits of a source into `folder`. Memory in use is bounded by the longest few documents."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    with _Writer(folder, TRAIN, dtype) as train, _Writer(folder, VALIDATION, dtype) as validation:
        for group in _groups(source.documents()):
            _write(group, {TRAIN: train, VALIDATION: validation}, source, tokenizer, share)
        train.finish()
        validation.finish()
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype.str, "where": source.where}))


def _groups(documents: Iterable[Document], size: int = 4 << 20) -> Iterator[list[Document]]:
    """Documents in lists of about `size` characters or ids, which a tokenizer works on together."""
    group: list[Document] = []
    gathered = 0
    for document in documents:
        group.append(document)
        gathered += len(document.content)
        if gathered > size:
            yield group
            group, gathered = [], 0
    if group:
        yield group


def _write(group: list[Document], writers: dict[str, _Writer], source: Source, tokenizer: Tokenizer, share: float) -> None:
    texts = iter(tokenizer.encode_all([d.content for d in group if isinstance(d.content, str)]))
    for document in group:
        ids = next(texts) if isinstance(document.content, str) else document.content
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            raise PartitaError(
                f"data.path: {source.where} holds token ids from {ids.min()} to {ids.max()}, "
                f"outside the vocabulary of {tokenizer.vocab_size}\n"
                "    -> set data.tokenizer to the one they were made with (or data.tokenizer=ids data.vocab=SIZE)"
            )
        # Documents that already end with the end token are left alone.
        end = None if ids.size and ids[-1] == tokenizer.eos else tokenizer.eos
        writers[VALIDATION if is_held(document, share) else TRAIN].add(ids, end)


def _open(entry: Path, side: str, where: str) -> Corpus:
    dtype = json.loads((entry / "meta.json").read_text())["dtype"]
    file = formats.read_raw(entry / f"{side}.bin", dtype)
    return Corpus(file.tokens, np.load(entry / f"{side}.starts.npy"), where, identity(file.tokens))


def identity(tokens: NDArray[Any]) -> str:
    """Size, dtype and sampled checksum of tokens [n]: equal after a copy to another machine, and cheap for any size."""
    return f"{tokens.size}x{tokens.dtype.str}:{sampled_crc(tokens.view(np.uint8)):08x}"


# ------------------------------------------------------------------ token files


def make_tokens(config: Any, tokenizer: Tokenizer, split: str) -> Corpus:
    """Token files at `data.path`: one file, split by position, or a folder with train.bin and val.bin (or validation.bin)."""
    if config.data.limit is not None:
        raise ConfigError("data.limit: counts bytes of text, but data.name=tokens reads token files\n    -> leave data.limit out")
    path = need_path(config)
    if path.is_dir():
        return _from_folder(config, path, split)
    return held_tail(_read_tokens(config, path), check_share(config), split)


def _from_folder(config: Any, folder: Path, split: str) -> Corpus:
    train = folder / "train.bin"
    held = next((p for name in ("val", "validation") if (p := folder / f"{name}.bin").exists()), None)
    if not train.exists():
        raise ConfigError(
            f"data.path: no train.bin in the folder {folder}\n    -> name the file itself: data.path={folder}/NAME.bin"
        )
    if held is None:
        return held_tail(_read_tokens(config, train), check_share(config), split)
    return _read_tokens(config, train if split == TRAIN else held)


def _read_tokens(config: Any, path: Path) -> Corpus:
    if path.suffix not in (".bin", ".idx") and not path.exists():
        path = path.with_name(path.name + ".bin")  # Megatron names its pairs by their prefix
    kind = config.data.format
    if kind == "auto":
        kind = "megatron" if path.with_suffix(".idx").exists() else "raw"
    if kind not in ("megatron", "raw"):
        raise ConfigError(f"data.format: {kind!r}\n    -> auto, megatron or raw")
    file = formats.read_megatron(path) if kind == "megatron" else formats.read_raw(path, _dtype(config))
    if not file.tokens.size:
        raise PartitaError(f"data.path: {path} is empty\n    -> a file with at least data.sequence + 1 tokens")
    return Corpus(file.tokens, file.starts, str(path), identity(file.tokens))


def _dtype(config: Any) -> str:
    known = ("uint16", "uint32", "int32")
    if config.data.dtype == "auto":
        return "uint16" if vocab_size(config) <= 1 << 16 else "uint32"
    if config.data.dtype not in known:
        raise ConfigError(f"data.dtype: {config.data.dtype!r}\n    -> auto, {', '.join(known)}")
    return str(config.data.dtype)


# ------------------------------------------------------------------ synthetic


def make_synthetic(config: Any, tokenizer: Tokenizer, split: str) -> Corpus:
    """Counting sequences that a model can learn: each of 64 tokens begins anywhere and goes up by 1 to 4, modulo the vocabulary.

    Depends on `seed` and the vocabulary only. `data.limit` tokens (default 1,048,576); the last share is for validation.
    """
    if config.data.path is not None:
        raise ConfigError("data.path: data.name=synthetic reads no path\n    -> leave data.path out")
    total, length = int(config.data.limit or SYNTHETIC_TOKENS), 64
    words = max(1, min(vocab_size(config, tokenizer.vocab_size), tokenizer.vocab_size) - len(tokenizer.special))
    rows = grid(key("synthetic", config.seed), np.arange(-(-total // length), dtype=np.int64), 2)
    first, stride = rows[:, :1] % np.uint64(words), rows[:, 1:] % np.uint64(4) + np.uint64(1)
    tokens = (first + stride * np.arange(length, dtype=np.uint64)) % np.uint64(words)
    tokens = tokens.astype("<u4").reshape(-1)[:total]
    corpus = Corpus(tokens, np.arange(0, total, length, dtype=np.int64), "synthetic", identity(tokens))
    return held_tail(corpus, check_share(config), split)


CORPORA = {"stdlib": make_stdlib, "text": make_text, "tokens": make_tokens, "hf": make_hf, "synthetic": make_synthetic}
