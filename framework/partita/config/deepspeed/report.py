"""What became of each key of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from partita.plan.problems import Problem

TAKEN, FILLED, UNNEEDED, REFUSED = "taken over", "filled", "not needed", "refused"
VERDICTS = (TAKEN, FILLED, UNNEEDED, REFUSED)


@dataclass(frozen=True)
class Line:
    """One key. path, value: as in the file (value None with `filled`: not there). key, got: ours. why: the reason or the rule."""

    path: str
    value: str
    verdict: str
    key: str = ""
    got: str = ""
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        target = f" -> {self.key}={self.got}" if self.key else ""
        why = f" ({self.why})" if self.why and self.verdict != REFUSED else f": {self.why}" if self.why else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.path} = {self.value}{target}{why}{remedy}"


@dataclass
class Translation:
    """values: our keys with their values, in order. lines: what became of each of theirs."""

    where: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def of(self, verdict: str) -> list[Line]:
        """The lines with a verdict."""
        return [line for line in self.lines if line.verdict == verdict]

    def problems(self) -> list[Problem]:
        """The refusals."""
        return [Problem(line.path, line.why, line.remedy) for line in self.of(REFUSED)]

    def text(self) -> str:
        """The report: a block for each verdict, in the order of the file."""
        counts = ", ".join(f"{len(self.of(v))} {v}" for v in VERDICTS)
        blocks = [f"DeepSpeed config {self.where}: {counts}"]
        for verdict in VERDICTS:
            lines = self.of(verdict)
            if lines:
                blocks.append("\n".join([f"  {verdict}:", *(f"    {line}" for line in lines)]))
        return "\n".join(blocks)

    def native(self) -> dict[str, Any]:
        """The values as a nested dict: the equivalent config."""
        return nested(self.values.items())


def nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Dicts in dicts from dotted keys."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        *parents, leaf = key.split(".")
        node = out
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return out
