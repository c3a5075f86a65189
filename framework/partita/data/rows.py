"""Rows of JSONL and Parquet files, one after the other, as dicts. Errors name file and row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from partita.errors import ConfigError, PartitaError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def is_table(path: Path) -> bool:
    """Whether a file holds rows."""
    return path.name.endswith(SUFFIXES)


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Row]]:
    """(number from 1, row). columns: those that are wanted of a Parquet file; default: all. Raises PartitaError for damaged files."""
    return _parquet(path, columns) if path.suffix == ".parquet" else _jsonl(path)


def _jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise PartitaError(f"data.path: can't read {path}: {error}") from error


def _object(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PartitaError(f"data.path: {path}, line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PartitaError(f"data.path: {path}, line {number}: it is no object\n    -> one JSON object on each line")
    return row


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"data.path: {path.name} needs pyarrow ({error})\n    -> pip install 'partita[hf]'") from error
    try:
        file = parquet.ParquetFile(path)
        known = file.schema_arrow.names
        lacking = [c for c in columns or () if c not in known]
        if lacking:
            raise ConfigError(f"data.column: {path} has no column {lacking[0]!r}\n    -> one of {', '.join(known)}")
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=list(columns) if columns else None):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, pyarrow.ArrowException) as error:
        raise PartitaError(f"data.path: can't read {path}: {error}") from error
