"""metrics.jsonl: one JSON line for each step and each evaluation."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, TextIO


class MetricsFile:
    """Appends lines, flushed one by one. After a resume the lines of steps that will be made again are dropped."""

    def __init__(self, path: Path, enabled: bool) -> None:
        self._path, self._enabled = path, enabled
        self._file: TextIO | None = None

    def cut(self, step: int) -> None:
        """Keep the lines up to `step` and open the file for more. A torn last line (a kill while writing) is dropped."""
        if not self._enabled:
            return
        kept = [line for line in self._lines() if line["step"] <= step]
        fresh = self._path.with_suffix(".tmp")
        fresh.write_text("".join(_dump(line) for line in kept))
        os.replace(fresh, self._path)
        self._file = self._path.open("a")

    def set_aside(self, step: int) -> None:
        """The run goes another way from `step` on: where the file has lines beyond it, keep it under another name, metrics-1.jsonl and so on."""
        if not self._enabled or not any(line["step"] > step for line in self._lines()):
            return
        number = 1
        while (kept := self._path.with_name(f"{self._path.stem}-{number}{self._path.suffix}")).exists():
            number += 1
        shutil.copyfile(self._path, kept)

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        out: list[dict[str, Any]] = []
        for text in self._path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                break
            out.append(line)
        return out

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line."""
        if self._file is not None:
            self._file.write(_dump(metrics))
            self._file.flush()

    def close(self) -> None:
        """Close the file; more lines are ignored."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _dump(metrics: dict[str, Any]) -> str:
    # JSON has no NaN: a null is readable everywhere
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
    return json.dumps(clean) + "\n"
