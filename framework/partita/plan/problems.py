"""Problems found before a run starts: all of them are listed at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a plan from being run.

    key: config path that the user can change, e.g. `zero.stage`.
    reason: what is wrong, with the numbers.
    remedy: what to write instead, with the legal values.
    """

    key: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}\n    -> {self.remedy}"


def render(problems: Sequence[Problem]) -> str:
    """All problems as one screen of text, numbered when there is more than one."""
    if len(problems) == 1:
        return str(problems[0])
    return "\n".join(f"{i}. {p}" for i, p in enumerate(problems, 1))
