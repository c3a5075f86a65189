"""Where the output of a rank goes: rank 0 to the console and its file, other ranks to their file only."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PLAIN = "%(message)s"
_DATED = "%(asctime)s %(levelname)s %(message)s"


class Logs:
    """The output of one rank, from when it is opened. The file is appended to: a resumed run goes on in it."""

    def __init__(self, folder: Path, rank: int, level: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._file = (folder / f"rank{rank}.log").open("a", buffering=1, errors="replace")
        self._out, self._err = os.dup(1), os.dup(2)
        console = sys.stdout
        if rank:
            self._to_file()
        else:
            sys.stdout, sys.stderr = _Tee(sys.stdout, self._file), _Tee(sys.stderr, self._file)  # type: ignore[assignment]
        self._handlers(None if rank else console, level)
        faulthandler.enable(self._file)

    def header(self, text: str) -> None:
        """A line in the file only."""
        self._file.write(f"---- {text}\n")

    def alone(self) -> None:
        """From now on this rank, whichever it is, speaks on the console: it has the message of the run."""
        self._flush()
        os.dup2(self._out, 1)
        os.dup2(self._err, 2)

    def silence(self) -> None:
        """From now on this rank writes to its file only: another one has the message of the run."""
        self._flush()
        sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
        self._to_file()

    def _to_file(self) -> None:
        os.dup2(self._file.fileno(), 1)
        os.dup2(self._file.fileno(), 2)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def _handlers(self, console: TextIO | None, level: str) -> None:
        root = logging.getLogger()
        root.handlers.clear()
        file = logging.StreamHandler(self._file)
        file.setFormatter(logging.Formatter(_DATED, "%Y-%m-%d %H:%M:%S"))
        root.addHandler(file)
        if console is not None:
            handler = logging.StreamHandler(console)
            handler.setFormatter(logging.Formatter(_PLAIN))
            handler.addFilter(lambda record: not record.getMessage().startswith("traceback of rank"))  # for the file
            root.addHandler(handler)
        root.setLevel(level.upper())
        logging.captureWarnings(True)


class _Tee:
    """A console stream whose finished lines go to a file as well; a line that is drawn again and again, as it was last."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream, self._file, self._line = stream, file, ""

    def write(self, text: str) -> int:
        """Like a stream's."""
        self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._file.write(_last(line) + "\n")
        self._line = _last(self._line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last(line: str) -> str:
    """What a terminal shows of a line in the end: the text after the last carriage return, without colours and cursor moves."""
    kept = line.rstrip("\r")
    return _ESCAPE.sub("", kept[kept.rfind("\r") + 1 :])
