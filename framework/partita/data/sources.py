"""Where documents come from: the standard library's source text, text files, Hugging Face datasets on disk.

A source is read as a stream of documents. Which of them are held out for validation depends on their content alone, so adding or
renaming files never moves a document from one side to the other.
"""

from __future__ import annotations

import glob
import gzip
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.data.hashing import digest, fraction
from partita.data.rows import is_table, read_rows
from partita.errors import ConfigError, PartitaError

STDLIB_LIMIT = 4 << 20  # bytes
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".jsonl", ".parquet")

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Document:
    """A text, or token ids [n]; `held` says whether it is for validation where the source itself knows."""

    content: str | NDArray[Any]
    held: bool | None = None


@dataclass(frozen=True)
class Source:
    """Documents of one place. key: changes with the files and with what is read of them. where: for messages."""

    key: str
    where: str
    documents: Callable[[], Iterator[Document]]


def is_held(document: Document, share: float) -> bool:
    """Whether a document belongs to the validation set."""
    if document.held is not None:
        return document.held
    content = document.content
    data = content.encode("utf-8", errors="surrogatepass") if isinstance(content, str) else content.astype("<i8").tobytes()
    return fraction(data) < share


def training_texts(source: Source, share: float) -> Iterator[str]:
    """The texts that are not held out; all of them where that would leave none (a source of one document)."""
    texts = (d for d in source.documents() if isinstance(d.content, str))
    found = False
    for document in texts:
        if not is_held(document, share):
            found = True
            yield str(document.content)
    if not found:
        yield from (str(d.content) for d in source.documents() if isinstance(d.content, str))


def find_source(config: Any) -> Source | None:
    """The source of a built-in corpus of documents; None for one that isn't read as documents."""
    from partita.data.tuning import sft_source  # it reads `Document`

    maker = {"stdlib": stdlib_source, "text": text_source, "hf": hf_source, "sft": sft_source}.get(config.data.name)
    return maker(config) if maker else None


# ------------------------------------------------------------------ standard library


def stdlib_source(config: Any) -> Source:
    """Python files of the running interpreter's standard library, by depth and name: modules first, then packages."""
    _no_path(config)
    limit = _limit(config, STDLIB_LIMIT)
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _until(_python_files(root), limit or 0)
    if not files:
        raise PartitaError(f"data.name=stdlib: no Python source files in {root}\n    -> data.name=text data.path=FOLDER")
    return _file_source("stdlib", str(root), files, limit, column="")


def _python_files(root: Path) -> Iterator[Path]:
    """All .py files under `root`, level by level, so that a small limit never walks the whole tree."""
    level = [root]
    while level:
        entries = sorted((e for folder in level for e in os.scandir(folder)), key=lambda e: e.path)
        yield from (Path(e.path) for e in entries if e.name.endswith(".py") and e.is_file())
        level = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and e.name not in _SKIPPED_FOLDERS]


def _until(files: Iterable[Path], limit: int) -> list[Path]:
    """Files until their sizes reach `limit` bytes."""
    chosen, total = [], 0
    for path in files:
        if total >= limit:
            break
        chosen.append(path)
        total += path.stat().st_size
    return chosen


def _no_path(config: Any) -> None:
    if config.data.path is not None:
        raise ConfigError(
            f"data.path: {config.data.path!r} is set, but data.name={config.data.name} reads no path\n"
            "    -> data.name=text, or leave data.path out"
        )


def _limit(config: Any, default: int | None) -> int | None:
    limit = default if config.data.limit is None else config.data.limit
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit: {limit} bytes\n    -> at least 1, or leave it out")
    return limit


# ------------------------------------------------------------------ text files


def text_source(config: Any) -> Source:
    """Text files, a document each; .jsonl and .parquet files, a document each row (`data.column`). All but the last may be gzipped."""
    path = need_path(config)
    files = _text_files(path)
    return _file_source("text", str(path), files, _limit(config, None), config.data.column)


def need_path(config: Any) -> Path:
    """`data.path`. Raises ConfigError where it is missing."""
    if not config.data.path:
        raise ConfigError(f"data.path: data.name={config.data.name} needs one\n    -> data.path=FILE or FOLDER")
    return Path(config.data.path).expanduser()


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        kinds = tuple(TEXT_SUFFIXES) + tuple(s + ".gz" for s in TEXT_SUFFIXES)
        files = [p for p in path.rglob("*") if p.name.endswith(kinds) and p.is_file()]
        files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        hint = f"a folder is searched for {', '.join(TEXT_SUFFIXES)} (also .gz); a glob takes any name"
    else:
        files = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        hint = "give a file, a folder, or a glob in quotes"
    if not files:
        raise ConfigError(f"data.path: no text files at {path}\n    -> {hint}")
    return sorted(files)


def _file_source(name: str, where: str, files: list[Path], limit: int | None, column: str) -> Source:
    key = digest(1, name, stat_key(files), limit, column)
    return Source(key, where, lambda: _limited(_read_all(files, column), limit))


def stat_key(files: Iterable[Path]) -> str:
    """Changes when a file is added, removed, moved, or written."""
    stats = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in files for s in (p.stat(),)]
    return digest(*stats)


def _read_all(files: Iterable[Path], column: str) -> Iterator[Document]:
    for path in files:
        if is_table(path):
            yield from _read_column(path, column)
        elif text := _read_text(path):
            yield Document(text)


def _read_bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise PartitaError(f"data.path: can't read {path}: {error}") from error


def _read_text(path: Path) -> str:
    """The text of a file. Bytes that are not UTF-8 become U+FFFD; a NUL among the first ones means that it is no text."""
    data = _read_bytes(path)
    if b"\0" in data[:8192]:
        raise PartitaError(
            f"data.path: {path} is not a text file (it holds NUL bytes)\n    -> data.name=tokens for token files, or leave it out"
        )
    return data.decode("utf-8", errors="replace")


def _read_column(path: Path, column: str) -> Iterator[Document]:
    """Documents of a .jsonl or .parquet file, row by row. Errors name file and row."""
    for number, row in read_rows(path, [column]):
        text = row.get(column)
        if not isinstance(text, str) and (text is not None or path.suffix != ".parquet"):
            keys = ", ".join(map(str, row))
            where = f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {number}"
            raise PartitaError(f"data.column: {where} has no text under {column!r} ({keys})\n    -> data.column=KEY")
        if text:
            yield Document(text)


def _limited(documents: Iterator[Document], limit: int | None) -> Iterator[Document]:
    """Documents until `limit` bytes of text; the last one is cut there."""
    left = limit
    for document in documents:
        if left is None or not isinstance(document.content, str):
            yield document
            continue
        data = document.content.encode("utf-8", errors="surrogatepass")
        if len(data) > left:
            # A character that the cut falls into is dropped.
            document = Document(data[:left].decode("utf-8", errors="ignore"), document.held)
        left -= len(data)
        if document.content:
            yield document
        if left <= 0:
            return


# ------------------------------------------------------------------ Hugging Face datasets


def hf_source(config: Any) -> Source:
    """A dataset written by `save_to_disk`: column `data.column` of text or token ids, and its own validation split if any."""
    path = need_path(config)
    if not path.is_dir():
        raise ConfigError(f"data.path: {path} is not a folder\n    -> a folder written by datasets.Dataset.save_to_disk")
    limit, column = _limit(config, None), config.data.column
    files = sorted(p for p in path.rglob("*") if p.is_file())
    key = digest(1, "hf", stat_key(files), limit, column)
    return Source(key, str(path), lambda: _limited(_read_dataset(path, column, limit), limit))


def _read_dataset(path: Path, column: str, limit: int | None) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise PartitaError("data.name=hf: the package `datasets` is not installed\n    -> pip install 'partita[hf]'") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # arrow, JSON and file errors of many classes
        raise PartitaError(f"data.path: {path} is not a dataset on disk: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        yield from _rows(loaded, path, column, None, limit)
        return
    held = next((s for s in ("validation", "valid", "val", "test") if s in loaded), None)
    if "train" not in loaded:
        raise PartitaError(
            f"data.path: {path} has the splits {', '.join(loaded)}, but no `train`\n"
            f"    -> data.path={path / next(iter(loaded), '')}"
        )
    yield from _rows(loaded["train"], path, column, False if held else None, limit)
    if held:
        yield from _rows(loaded[held], path, column, True, limit)


def _rows(dataset: Any, path: Path, column: str, held: bool | None, limit: int | None) -> Iterator[Document]:
    if column not in dataset.column_names:
        raise ConfigError(f"data.column: {path} has no column {column!r}\n    -> one of {', '.join(dataset.column_names)}")
    for rows in dataset.select_columns([column]).iter(batch_size=256):
        for value in rows[column]:
            if value is not None and len(value):
                yield Document(_value(value, path, column, limit), held)


def _value(value: Any, path: Path, column: str, limit: int | None) -> str | NDArray[Any]:
    if isinstance(value, str):
        return value
    ids = np.asarray(value)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"data.column: column {column!r} of {path} holds neither text nor lists of token ids\n    -> data.column=NAME"
        )
    if limit is not None:
        raise ConfigError(
            f"data.limit: counts bytes of text, but column {column!r} of {path} holds token ids\n    -> leave data.limit out"
        )
    return ids
