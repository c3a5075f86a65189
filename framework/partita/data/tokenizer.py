"""Tokenizers: bytes, byte-level BPE trained on the corpus, a tokenizer.json, plain ids. Builders of the slot `tokenizer`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from partita.data.cache import cache_dir, cached
from partita.data.hashing import digest
from partita.errors import ConfigError, PartitaError

Ids = NDArray[Any]

END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
NAMES = ("bytes", "bpe", "ids")  # other values of data.tokenizer are paths, or names of a plug-in

_KNOWN_ENDS = (END, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
_KNOWN_MASKS = (MASK, "[MASK]", "<mask>")
_BYTES_VOCAB = 260  # 256 bytes, end, mask, pad and one spare, so that 2 and 4 tensor ranks divide it
_BPE_LEAST = 256 + 3


@runtime_checkable
class Tokenizer(Protocol):
    """What the slot `tokenizer` builds. `eos` ends each document; `mask` is None where masked language models can't use it.

    vocab_size: all ids are below it. special: ids that no text gives. fingerprint: equal for tokenizers that encode alike.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def mask(self) -> int | None: ...
    @property
    def special(self) -> tuple[int, ...]: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> Ids:
        """Ids [n] of a text, without end token."""

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of many texts."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ones are left out."""


class BytesTokenizer:
    """UTF-8 bytes as ids 0 to 255, then end, mask, pad and a spare one."""

    vocab_size = _BYTES_VOCAB
    eos = 256
    mask = 257
    special = (256, 257, 258, 259)
    fingerprint = "bytes-1"

    def encode(self, text: str) -> Ids:
        """Ids [n] of a text, without end token."""
        # surrogatepass: a lone surrogate in JSON text must not end the run.
        return np.frombuffer(text.encode("utf-8", errors="surrogatepass"), dtype=np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ones are left out, broken UTF-8 is shown as U+FFFD."""
        values = np.asarray(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class IdsTokenizer:
    """For token files without their tokenizer: text is the ids themselves, in decimal. None of them is known to be special."""

    eos = None
    mask = None
    special = ()

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab
        self.fingerprint = f"ids-{vocab}"

    def encode(self, text: str) -> Ids:
        """The integers below the vocabulary size in the text; id 0 where there are none, so that any text is a prompt."""
        found = (int(word) for word in re.findall(r"\d+", text))
        return np.array([i for i in found if i < self.vocab_size] or [0], dtype=np.int64)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, separated by spaces."""
        return " ".join(str(int(i)) for i in ids)


class FileTokenizer:
    """A tokenizer.json, read with the library `tokenizers`. `size`: least vocabulary size, for ids never used."""

    def __init__(self, path: Path, size: int = 0, end: str | None = None) -> None:
        self._inner = _load(path)
        vocab = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(size, max(vocab.values(), default=-1) + 1)
        self.eos = _first(vocab, (end,) if end else _KNOWN_ENDS)
        self.mask = _first(vocab, _KNOWN_MASKS)
        self.special = tuple(sorted(i for i, t in self._inner.get_added_tokens_decoder().items() if t.special))
        self.fingerprint = digest(self._inner.to_str())

    def encode(self, text: str) -> Ids:
        """Ids [n] of a text, without special tokens."""
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of many texts, on all cores."""
        return [np.array(e.ids, dtype=np.int64) for e in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ones and rows that are never used are left out."""
        return str(self._inner.decode([int(i) for i in ids if i < self.vocab_size], skip_special_tokens=True))


def _first(vocab: dict[str, int], words: Iterable[str]) -> int | None:
    return next((vocab[w] for w in words if w in vocab), None)


def _load(path: Path) -> Any:
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise PartitaError(f"data.tokenizer: {path} is not a tokenizer.json that `tokenizers` can read: {error}") from error
    inner.no_padding()
    inner.no_truncation()
    return inner


def _locate(value: str) -> tuple[Path, str | None]:
    """The tokenizer.json that data.tokenizer names, and its end token where a tokenizer_config.json beside it tells."""
    path = Path(value).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ConfigError(
            f"data.tokenizer: no tokenizer.json in {path}\n"
            "    -> with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    if not file.exists():
        raise ConfigError(
            f"data.tokenizer: {value!r} is neither a name nor a file\n    -> {', '.join(NAMES)}, or a path to a tokenizer.json"
        )
    return file, _configured_end(file.with_name("tokenizer_config.json"))


def _configured_end(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        end = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise PartitaError(f"data.tokenizer: {path} is not a JSON object: {error}") from error
    return end["content"] if isinstance(end, dict) else end


# ------------------------------------------------------------------ builders of the slot


def make_bytes(config: Any) -> Tokenizer:
    """UTF-8 bytes."""
    return BytesTokenizer()


def make_ids(config: Any) -> Tokenizer:
    """Plain ids below `model.vocab`, else `data.vocab`."""
    return IdsTokenizer(_ids_vocab(config))


def make_file(config: Any) -> Tokenizer:
    """The tokenizer.json at `data.tokenizer`. Raises ConfigError where there is none."""
    path, end = _locate(config.data.tokenizer)
    return FileTokenizer(path, end=end)


def make_bpe(config: Any) -> Tokenizer:
    """A byte-level BPE of `data.vocab` entries, trained once on the corpus's training documents, then read from the cache."""
    from partita.data.sources import find_source, training_texts

    vocab = _bpe_vocab(config)
    source = find_source(config)
    if source is None:
        raise ConfigError(
            f"data.tokenizer: bpe is trained on text, and data.name={config.data.name} has none\n"
            "    -> data.tokenizer=ids or a path"
        )
    name = f"bpe-{digest(1, source.key, config.data.validation, vocab)}"

    def build(folder: Path) -> None:
        train_bpe(training_texts(source, config.data.validation), vocab, folder / "tokenizer.json")

    return FileTokenizer(cached(cache_dir(config.data.cache), name, build) / "tokenizer.json", size=vocab)


def train_bpe(texts: Iterable[str], vocab: int, path: Path) -> None:
    """Trains a byte-level BPE of at most `vocab` entries (fewer where the text is too short) and writes it to `path`."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, MASK, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_grouped(texts), trainer)
    inner.save(str(path))


def _grouped(texts: Iterable[str], size: int = 64) -> Iterator[list[str]]:
    """Lists of texts: the trainer reads the next list while it works on one."""
    group: list[str] = []
    for text in texts:
        group.append(text)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def make_tokenizer(config: Any) -> Tokenizer:
    """The built-in tokenizer that `data.tokenizer` names; everything that isn't a name is a path."""
    return {"bytes": make_bytes, "bpe": make_bpe, "ids": make_ids}.get(config.data.tokenizer, make_file)(config)


# ------------------------------------------------------------------ vocabulary


def stated_size(config: Any, registry: Any) -> int | None:
    """Vocabulary size of a plug-in's tokenizer: what its builder states in its attribute `vocab_size(config)`, else of the one built.

    None where `data.tokenizer` is a built-in name or a path, whose sizes `vocab_size` knows.
    """
    name = config.data.tokenizer
    if name in NAMES or name not in registry.slots().get("tokenizer", {}):
        return None
    builder = registry.provide("tokenizer", name)
    stated = getattr(builder, "vocab_size", None)
    return int(stated(config) if callable(stated) else builder(config).vocab_size)


def vocab_size(config: Any, own: int | None = None) -> int:
    """Entries of the model's vocabulary, without training a tokenizer: `model.vocab`, else the size of the tokenizer.

    own: the tokenizer's size, where the caller knows it (`stated_size`; a tokenizer that is built).
    Raises ConfigError where `model.vocab` is smaller than the tokenizer of a text corpus, or a size is out of range.
    """
    asked = config.model.vocab
    if asked is not None and asked < 1:
        raise ConfigError(f"model.vocab: {asked} entries\n    -> at least 1")
    # The ids of token files are not the tokenizer's doing; they are checked when read.
    if asked is not None and config.data.name in ("tokens", "synthetic"):
        return int(asked)
    own = own or _tokenizer_size(config)
    if asked is not None and asked < own:
        raise ConfigError(
            f"model.vocab: {asked} entries, but data.tokenizer={config.data.tokenizer} has {own}\n"
            f"    -> model.vocab={own} or more, or leave it out"
        )
    return int(asked or own)


def _tokenizer_size(config: Any) -> int:
    name = config.data.tokenizer
    if name == "bytes":
        return _BYTES_VOCAB
    if name == "bpe":
        return _bpe_vocab(config)
    if name == "ids":
        return _ids_vocab(config)
    path, _ = _locate(name)
    return FileTokenizer(path).vocab_size


def _bpe_vocab(config: Any) -> int:
    if config.data.vocab < _BPE_LEAST:
        raise ConfigError(
            f"data.vocab: {config.data.vocab} entries, but byte-level BPE has 256 bytes and 3 special tokens\n"
            f"    -> at least {_BPE_LEAST}"
        )
    return int(config.data.vocab)


def _ids_vocab(config: Any) -> int:
    vocab = int(config.model.vocab or config.data.vocab)
    if vocab < 2:
        raise ConfigError(f"data.vocab: {vocab} entries\n    -> at least 2")
    return vocab
