"""The corpus `sft`: conversations, each whole in one sample, of which the assistant's words are learnt.

Samples of `data.sequence` tokens stand one after the other in the row of tokens. With `data.pack` a sample holds several
conversations, placed best fit decreasing (Ding et al. 2024, Fewer Truncations Improve Language Modeling), else one; what is left is
filled with the end token.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.data import formats
from partita.data.cache import cache_dir, cached
from partita.data.chat import ChatTemplate, RowError, Segment, find_template, segments_of, told
from partita.data.corpus import TRAIN, VALIDATION, Corpus, check_share, identity
from partita.data.hashing import digest
from partita.data.rows import SUFFIXES, is_table, read_rows
from partita.data.sources import Document, Source, is_held, need_path, stat_key
from partita.data.tokenizer import Tokenizer
from partita.errors import ConfigError, PartitaError

log = logging.getLogger(__name__)

GROUP = 4096  # conversations that are placed together: bounds memory, and keeps neighbours of the files near
HELD = ("val", "test", "eval")  # how the names of files begin that are for validation


@dataclass(frozen=True)
class Talk:
    """A conversation: ids [n], which of them are learnt [n], whether it is for validation."""

    ids: NDArray[np.int64]
    learnt: NDArray[np.bool_]
    held: bool


def make_sft(config: Any, tokenizer: Tokenizer, split: str) -> Corpus:
    """Conversations at `data.path`: a .jsonl or .parquet file, or a folder of them."""
    if config.data.limit is not None:
        raise ConfigError("data.limit: counts bytes of text, and conversations are not cut\n    -> leave data.limit out")
    share, template, files = check_share(config), find_template(config), table_files(need_path(config))
    d = config.data
    what = (stat_key(files), template.source, template.tokens, tokenizer.fingerprint, tokenizer.vocab_size, share)
    name = f"sft-{digest(1, *map(str, what), d.sequence, d.pack, d.column, d.mask_prompt)}"
    build = lambda folder: _build(folder, config, tokenizer, template, files, share)  # noqa: E731
    entry = cached(cache_dir(d.cache), name, build)
    parts = {side: _open(entry, side, str(need_path(config))) for side in (TRAIN, VALIDATION)}
    empty = [side for side, part in parts.items() if not part.tokens.size]
    if share == 0.0 or not empty:
        return parts[split]
    # the hash put all on one side (there are few of them): the last samples are held out instead
    whole = parts[VALIDATION if empty[0] == TRAIN else TRAIN]
    samples = whole.tokens.size // d.sequence
    cut = (samples - max(round(samples * share), min(1, samples - 1))) * d.sequence
    return whole.part(0, cut + 1) if split == TRAIN else whole.part(cut, whole.tokens.size)


def sft_source(config: Any) -> Source:
    """The texts alone, to train a tokenizer on."""
    files, template = table_files(need_path(config)), find_template(config)

    def documents() -> Iterator[Document]:
        for _, _, found in _talks(files, config, template):
            yield Document("".join(text for text, _ in found))

    return Source(digest(1, "sft", stat_key(files), template.source), str(need_path(config)), documents)


def table_files(path: Path) -> list[Path]:
    """The files with rows at a path, sorted."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if is_table(p) and p.is_file()] if path.is_dir() else []
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not files or not all(map(is_table, files)):
        raise ConfigError(f"data.path: no conversations at {path}\n    -> a file or folder of {', '.join(SUFFIXES)}")
    return sorted(files)


def _talks(files: list[Path], config: Any, template: ChatTemplate) -> Iterator[tuple[Path, bool | None, list[Segment]]]:
    """(file, whether it is held out where file names tell, pieces of text) of each row."""
    column = None if config.data.column == "text" else config.data.column
    told_by_name = any(f.name.startswith(HELD) for f in files)
    for path in files:
        held = path.name.startswith(HELD) if told_by_name else None
        for number, row in read_rows(path):
            try:
                yield path, held, segments_of(row, column, template)
            except RowError as error:
                raise told(path, number, error) from error


# ------------------------------------------------------------------ building


def _build(folder: Path, config: Any, tokenizer: Tokenizer, template: ChatTemplate, files: list[Path], share: float) -> None:
    length, fill = config.data.sequence, tokenizer.eos if tokenizer.eos is not None else 0
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    counts = {"conversations": 0, "cut": 0, "empty": 0}
    with _Side(folder, TRAIN, dtype, length, fill) as train, _Side(folder, VALIDATION, dtype, length, fill) as validation:
        for group in _groups(_talks(files, config, template)):
            ready: dict[bool, list[Talk]] = {False: [], True: []}
            for talk in _tokenized(group, tokenizer, share, config.data.mask_prompt):
                counts["conversations"] += 1
                counts["cut"] += talk.ids.size > length
                talk = replace(talk, ids=talk.ids[:length], learnt=talk.learnt[:length])
                if talk.learnt[1:].any():
                    ready[talk.held].append(talk)
                else:
                    counts["empty"] += 1
            for side, talks in ((train, ready[False]), (validation, ready[True])):
                side.add(_bins(talks, length) if config.data.pack else [[t] for t in talks])
    if counts["conversations"] == counts["empty"]:
        raise PartitaError(
            f"data.path: none of {counts['conversations']} conversations has a word of the assistant in its first {length} tokens\n"
            "    -> a larger data.sequence"
        )
    if counts["cut"]:
        log.warning(
            "%d of %d conversations are longer than data.sequence=%d and were cut there; %d of them have nothing left to learn",
            counts["cut"], counts["conversations"], length, counts["empty"],
        )  # fmt: skip
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype.str, **counts}))


def _groups(talks: Iterator[tuple[Path, bool | None, list[Segment]]]) -> Iterator[list[tuple[bool | None, list[Segment]]]]:
    group = []
    for _, held, segments in talks:
        group.append((held, segments))
        if len(group) == GROUP:
            yield group
            group = []
    if group:
        yield group


def _tokenized(
    group: list[tuple[bool | None, list[Segment]]], tokenizer: Tokenizer, share: float, mask_prompt: bool
) -> Iterator[Talk]:
    """Pieces are tokenized one by one, as a prompt is when the model is used."""
    ids = iter(tokenizer.encode_all([text for _, segments in group for text, _ in segments]))
    for held, segments in group:
        pieces = [next(ids) for _ in segments]
        learnt = [np.full(p.size, learn or not mask_prompt) for p, (_, learn) in zip(pieces, segments, strict=True)]
        end = tokenizer.eos
        if end is not None and end not in pieces[-1][-2:].tolist():  # templates may end turns with it, and a line
            pieces.append(np.array([end]))
            learnt.append(np.ones(1, bool))
        document = Document("".join(text for text, _ in segments), held)
        yield Talk(np.concatenate(pieces).astype(np.int64), np.concatenate(learnt), is_held(document, share))


def _bins(talks: list[Talk], length: int) -> list[list[Talk]]:
    """Conversations of at most `length` tokens together, the longest first, each where the least room is left that is enough."""
    bins: list[list[Talk]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for talk in sorted(talks, key=lambda t: -t.ids.size):
        at = bisect.bisect_left(room, (talk.ids.size, -1))
        if at == len(room):
            bins.append([talk])
            bisect.insort(room, (length - talk.ids.size, len(bins) - 1))
        else:
            left, index = room.pop(at)
            bins[index].append(talk)
            bisect.insort(room, (left - talk.ids.size, index))
    return bins


class _Side:
    """Samples of one split, appended to files: ids, whether each is learnt, where documents begin."""

    def __init__(self, folder: Path, side: str, dtype: np.dtype[Any], length: int, fill: int) -> None:
        self._folder, self._name, self._dtype, self._length, self._fill = folder, side, dtype, length, fill
        self._ids, self._learnt = (folder / f"{side}.bin").open("wb"), (folder / f"{side}.learnt.bin").open("wb")
        self._starts: list[int] = []
        self._samples = 0

    def add(self, bins: list[list[Talk]]) -> None:
        """A sample for each list of conversations."""
        for talks in bins:
            ids, learnt = np.full(self._length, self._fill), np.zeros(self._length, np.uint8)
            at = 0
            for talk in talks:
                ids[at : at + talk.ids.size] = talk.ids
                learnt[at + 1 : at + talk.ids.size] = talk.learnt[1:]  # nothing foretells the first
                self._starts.append(self._samples * self._length + at)
                at += talk.ids.size
            if at < self._length:
                self._starts.append(self._samples * self._length + at)
            self._write(ids, learnt)
            self._samples += 1

    def _write(self, ids: NDArray[Any], learnt: NDArray[Any]) -> None:
        self._ids.write(ids.astype(self._dtype).tobytes())
        self._learnt.write(learnt.astype(np.uint8).tobytes())

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the files; one token more, since the last sample reads one ahead."""
        with self._ids, self._learnt:
            if self._samples:
                self._write(np.full(1, self._fill), np.zeros(1, np.uint8))
        np.save(self._folder / f"{self._name}.starts.npy", np.array(self._starts, np.int64))


def _open(entry: Path, side: str, where: str) -> Corpus:
    meta = json.loads((entry / "meta.json").read_text())
    ids = formats.read_raw(entry / f"{side}.bin", meta["dtype"]).tokens
    learnt = np.memmap(entry / f"{side}.learnt.bin", np.uint8, "r") if ids.size else np.empty(0, np.uint8)
    marks = f"{identity(ids)}:{identity(learnt)}" if ids.size else "none"
    return Corpus(ids, np.load(entry / f"{side}.starts.npy"), where, marks, learnt)
