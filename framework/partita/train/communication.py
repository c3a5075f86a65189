"""The communication log of a run: what each purpose sent, how long it took and how much of that the computing waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from partita.runtime.traffic import Tally

TEXT, PICTURE = "communication.txt", "communication.svg"
HEADS = ("purpose", "calls", "bytes", "seconds", "exposed", "of the step", "bus bandwidth")
WIDTH, LABEL, BAR, ROW, COLUMNS, PLOT = 960, 150, 420, 26, 160, 120  # of the picture, in pixels; columns: most bars of steps
HIDDEN, EXPOSED, COMPUTE, INK = "#8fb8de", "#c8452f", "#d9d9d9", "#222222"


@dataclass
class CommunicationLog:
    """Tallies of this rank, summed over steps. seconds: of each step; exposed: waiting in each step."""

    totals: dict[str, Tally] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)

    def add(self, seconds: float, tallies: Mapping[str, Tally]) -> dict[str, Any]:
        """Take over a step; returns its entry for the metrics, by purpose."""
        self.seconds.append(seconds)
        self.exposed.append(sum(t.exposed for t in tallies.values()))
        for purpose, tally in tallies.items():
            self.totals.setdefault(purpose, Tally()).add(tally)
        return {k: {**asdict(v), "bandwidth": v.bandwidth} for k, v in tallies.items()}

    @property
    def share(self) -> float:
        """Exposed time as a share of all steps."""
        return sum(self.exposed) / (sum(self.seconds) or 1.0)

    def words(self) -> str:
        """In one line."""
        steps = len(self.seconds)
        mean = sum(self.seconds) / (steps or 1)
        return f"communication of rank 0, mean of {steps} steps of {mean:.3g} s: {self.share:.1%} of the time is spent waiting for it"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Cells of the table, for one step."""
        steps = len(self.seconds) or 1
        mean = sum(self.seconds) / steps
        for purpose, t in self._ordered():
            calls, size, spent, exposed = t.calls / steps, t.bytes / steps, t.seconds / steps, t.exposed / steps
            share = f"{exposed / mean:.1%}" if mean else ""
            yield (
                purpose,
                f"{calls:.3g}",
                bytes_words(size),
                f"{spent:.3g}",
                f"{exposed:.3g}",
                share,
                f"{bytes_words(t.bandwidth)}/s",
            )

    def _ordered(self) -> list[tuple[str, Tally]]:
        return sorted(self.totals.items(), key=lambda item: -item[1].seconds)

    def table(self) -> str:
        """As text: a line for each purpose, figures of one step."""
        rows = [HEADS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows
        ]
        return "\n".join([self.words(), *lines])

    def write(self, folder: Path) -> Path:
        """Table and picture into the run's folder; returns the picture's path."""
        for name, text in ((TEXT, self.table() + "\n"), (PICTURE, self.picture())):
            part = folder / f"{name}.partial"
            part.write_text(text)
            os.replace(part, folder / name)
        return folder / PICTURE

    # ------------------------------------------------------------------ the picture

    def picture(self) -> str:
        """As SVG: a bar for each purpose (hidden and exposed seconds of a step), and all steps with the time that they waited."""
        purposes = self._ordered()
        height = 110 + ROW * len(purposes) + PLOT + 50
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}"><rect width="100%" height="100%" fill="white"/>',
            _text(16, 26, self.words()[0].upper() + self.words()[1:], size=14),
            *_legend(48),
            *self._bars(purposes, 70),
            *self._steps(90 + ROW * len(purposes)),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _bars(self, purposes: list[tuple[str, Tally]], top: int) -> Iterator[str]:
        steps = len(self.seconds) or 1
        longest = max((max(t.seconds, t.exposed) for _, t in purposes), default=0.0) / steps or 1.0
        for i, ((purpose, t), cells) in enumerate(zip(purposes, self.rows(), strict=True)):
            y, scale = top + ROW * i, BAR / longest / steps
            exposed, whole = t.exposed * scale, max(t.seconds, t.exposed) * scale
            yield _text(LABEL - 8, y + 15, purpose.replace("_", " "), anchor="end")
            yield _box(LABEL, y, exposed, ROW - 6, EXPOSED)
            yield _box(LABEL + exposed, y, whole - exposed, ROW - 6, HIDDEN)
            yield _text(
                LABEL + whole + 8, y + 15, f"{cells[3]} s, {cells[4]} s exposed; {cells[2]} in {cells[1]} calls, {cells[6]}"
            )

    def _steps(self, top: int) -> Iterator[str]:
        """A column for each step, or for a few in a row where there are many."""
        stride = -(-len(self.seconds) // COLUMNS) or 1
        groups = [slice(i, i + stride) for i in range(0, len(self.seconds), stride)]
        means = [(_mean(self.seconds[g]), _mean(self.exposed[g])) for g in groups]
        most = max((s for s, _ in means), default=0.0) or 1.0
        width = (WIDTH - LABEL - 40) / max(1, len(means))
        bottom = top + PLOT + 16
        yield _text(LABEL - 8, top + 20, f"{most:.3g} s", anchor="end")
        yield _text(LABEL - 8, bottom, "0", anchor="end")
        for i, (seconds, exposed) in enumerate(means):
            x, tall, red = LABEL + i * width, seconds / most * PLOT, exposed / most * PLOT
            yield _box(x, bottom - tall, max(width - 1, 0.5), tall - red, COMPUTE)
            yield _box(x, bottom - red, max(width - 1, 0.5), red, EXPOSED)
        yield _text(LABEL, bottom + 18, f"step 1 to {len(self.seconds)}")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _legend(y: int) -> Iterator[str]:
    words = ((EXPOSED, "the computing waits"), (HIDDEN, "hidden behind computing"), (COMPUTE, "computing (all else)"))
    for i, (colour, text) in enumerate(words):
        yield _box(LABEL + 200 * i, y - 10, 12, 12, colour)
        yield _text(LABEL + 200 * i + 18, y, text)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def bytes_words(size: float) -> str:
    """A number of bytes with a decimal unit."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.3g} B"
