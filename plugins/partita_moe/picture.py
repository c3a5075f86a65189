"""A heat map of the loads of all experts over a run, as an SVG that needs no library to make or to see."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS, ROWS = 160, 64  # most of them: updates, and experts of a layer, are averaged beyond
WIDE, HIGH, LEFT, TOP, GAP = 5, 5, 90, 40, 6  # pixels: a cell, the margins, between layers
FULL = 2.0  # times the even load at which the colour is at its end

Loads = Sequence[Sequence[float]]  # share of each expert, by layer


def draw_loads(folder: Path) -> Path | None:
    """Write `moe_load.svg` into a run's folder from its metrics; returns it, or None where no update told of loads."""
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text(encoding="utf-8") if metrics.is_file() else ""
    picture = heat_map(json.loads(line) for line in text.splitlines() if '"moe_load"' in line)
    if picture is None:
        return None
    out = folder / "moe_load.svg"
    out.write_text(picture, encoding="utf-8")
    return out


def heat_map(lines: Iterable[Mapping[str, Any]]) -> str | None:
    """The picture of metrics lines with `step` and `moe_load`; None where there are none. Time goes right, experts go down by layer.

    White is the even load, red more (up to twice as much), blue less.
    """
    told = [(int(line["step"]), line["moe_load"]) for line in lines if "moe_load" in line]
    if not told:
        return None
    times = _groups(len(told), COLUMNS)
    columns = [_mean([told[i][1] for i in group]) for group in times]
    layers, experts = len(columns[0]), len(columns[0][0])
    rows = _groups(experts, ROWS)
    high = layers * (len(rows) * HIGH + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + len(columns) * WIDE + 20}" height="{TOP + high + 30}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="16">Load of {experts} experts: white even, red more (x {FULL:g}), blue less</text>',
    ]
    for layer in range(layers):
        top = TOP + layer * (len(rows) * HIGH + GAP)
        out.append(f'<text x="4" y="{top + 10}">layer {layer + 1}</text>')
        for y, members in enumerate(rows):
            for x, column in enumerate(columns):
                load = sum(column[layer][e] for e in members) / len(members) * experts
                at = f'x="{LEFT + x * WIDE}" y="{top + y * HIGH}" width="{WIDE}" height="{HIGH}"'
                out.append(f'<rect {at} fill="{_colour(load)}"/>')
    bottom = TOP + high + 12
    out.append(f'<text x="{LEFT}" y="{bottom}">update {told[0][0]}</text>')
    out.append(f'<text x="{LEFT + len(columns) * WIDE}" y="{bottom}" text-anchor="end">{told[-1][0]}</text>')
    return "\n".join([*out, "</svg>\n"])


def _groups(count: int, most: int) -> list[range]:
    """0 to count - 1 in at most `most` neighbouring groups of about the same size."""
    groups = min(count, most)
    return [range(count * i // groups, count * (i + 1) // groups) for i in range(groups)]


def _mean(loads: list[Loads]) -> Loads:
    return [[sum(values) / len(loads) for values in zip(*layer, strict=True)] for layer in zip(*loads, strict=True)]


def _colour(load: float) -> str:
    """load: as a multiple of the even one."""
    away = min(abs(load - 1.0) / (FULL - 1.0), 1.0)
    faded = round(255 * (1.0 - away))
    return f"#ff{faded:02x}{faded:02x}" if load > 1.0 else f"#{faded:02x}{faded:02x}ff"
