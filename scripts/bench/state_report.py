"""What `state.py` prints and draws. The plot is SVG written by hand, so that no plotting library is needed."""

from __future__ import annotations

import html
import statistics
from typing import Any

MB = 2**20
NOT_INSTALLED = "NOT INSTALLED "  # an engine's error begins with it where the engine isn't there


def summarise(results: dict[str, Any], base: str) -> dict[str, dict[str, Any]]:
    """Medians over turns; ratios are medians of the ratios of turns that were neighbours in time."""
    rows: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        if "error" in result:
            missing = NOT_INSTALLED in result["error"]
            rows[name] = {
                "error": result["error"].partition(NOT_INSTALLED)[2] if missing else result["error"],
                "missing": missing,
            }
            continue
        ranks = result["ranks"]
        rows[name] = {
            "wall": statistics.median(s for t in result["turns"] for s in t["wall"]),
            "cpu": statistics.median(s for t in result["turns"] for s in t["cpu"]),
            "memory": max(r["peak"] - r["base"] for r in ranks) / MB,
            "sent": max(r["sent"] for r in ranks) / MB,
            "losses": ranks[0]["losses"],
        }
    reference = rows.get(base, {})
    if "error" not in reference:
        for name, row in rows.items():
            if "error" not in row:
                for key in ("wall", "cpu"):
                    row[f"{key}_ratio"] = _ratio(results[name]["turns"], results[base]["turns"], key)
                row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], reference["losses"], strict=True))
    return rows


def _ratio(turns: list[Any], base: list[Any], key: str) -> float:
    pairs = zip(turns, base, strict=False)
    return statistics.median(statistics.median(a[key]) / statistics.median(b[key]) for a, b in pairs)


def console_table(rows: dict[str, dict[str, Any]], what: str) -> str:
    """A line for each engine."""
    base = next(iter(rows))
    head = f"{'engine':<24}{'s/step':>9}{'/' + base:>10}{'CPU s':>9}{'/' + base:>10}{'peak MB':>9}{'sent MB':>9}{'last loss':>11}{'loss diff':>11}"
    lines = [what, head]
    for name, row in rows.items():
        name = name[-23:]
        if "error" in row:
            lines.append(f"{name:<24} {row['error']}")
            continue
        ratios = [f"{row[k]:>10.3f}" if k in row else f"{'':>10}" for k in ("wall_ratio", "cpu_ratio")]
        difference = f"{row['loss_difference']:>11.1e}" if "loss_difference" in row else ""
        lines.append(
            f"{name:<24}{row['wall']:>9.3f}{ratios[0]}{row['cpu']:>9.3f}{ratios[1]}"
            f"{row['memory']:>9.0f}{row['sent']:>9.1f}{row['losses'][-1]:>11.5f}{difference}"
        )
    lines.append("peak: of a rank over its imports, from the end of the warm-up on. sent: by a rank's own sockets, an update.")
    return "\n".join(lines)


def svg_plot(rows: dict[str, dict[str, Any]], what: str) -> str:
    """Three panels of bars: seconds of an update, peak memory, bytes sent."""
    ran = {name: row for name, row in rows.items() if "error" not in row}
    panels = [("wall", "seconds of an update", "{:.2f}"), ("memory", "peak memory, MB", "{:.0f}"), ("sent", "sent, MB", "{:.0f}")]
    left, width, bar, top = 150, 240, 22, 56
    height = top + bar * len(ran) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 3 * (width + 20)}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{html.escape(what)}</text>',
    ]
    for i, name in enumerate(ran):
        parts.append(f'<text x="{left - 8}" y="{top + bar * i + 15}" text-anchor="end">{html.escape(name[-20:])}</text>')
    for p, (key, title, form) in enumerate(panels):
        x = left + p * (width + 20)
        largest = max((row[key] for row in ran.values()), default=1) or 1
        parts.append(f'<text x="{x}" y="{top - 10}" font-weight="bold">{title}</text>')
        for i, (name, row) in enumerate(ran.items()):
            length = (width - 60) * row[key] / largest
            colour = "#1f6f8b" if name.startswith("partita") else "#b9b9b9"
            y = top + bar * i
            parts.append(f'<rect x="{x}" y="{y + 3}" width="{length:.1f}" height="{bar - 6}" fill="{colour}"/>')
            parts.append(f'<text x="{x + length + 4:.1f}" y="{y + 15}">{form.format(row[key])}</text>')
    return "\n".join([*parts, "</svg>\n"])
