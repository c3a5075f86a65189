"""What the console shows while a run goes on: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


class Progress:
    """Rank 0's view of the run. `total` steps, a lasting line every `every` steps."""

    def __init__(self, total: int, every: int, enabled: bool, console: Console | None = None) -> None:
        self._total, self._every, self._enabled = total, max(every, 1), enabled
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._live: Live | None = None
        self._rate = _Rate()

    def __enter__(self) -> Progress:
        if self._enabled and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, metrics: dict[str, Any]) -> None:
        """After each update."""
        if not self._enabled:
            return
        left = self._rate.left(self._total - metrics["step"])
        lasting = metrics["step"] % self._every == 0 or metrics["step"] in (1, self._total)
        if self._live is None and not lasting:
            return
        line = _line(metrics, self._total, left)
        if self._live is not None:
            self._live.update(Text(line))
        if lasting:
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._enabled:
            self._console.print(Text(text))


class _Rate:
    """Time left from the mean of recent steps."""

    def __init__(self) -> None:
        self._marks: list[float] = [time.perf_counter()]

    def left(self, steps: int) -> timedelta:
        self._marks = [*self._marks[-20:], time.perf_counter()]
        mean = (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)
        return timedelta(seconds=round(mean * steps))


def _line(m: dict[str, Any], total: int, left: timedelta) -> str:
    parts = [
        f"step {m['step']}/{total}",
        f"loss {m['loss']:.4f}",
        f"norm {m['grad_norm']:.3f}",
        f"lr {m['lr']:.2e}",
        f"{m['tokens_per_second']:,.0f} tokens/s",
    ]
    if m.get("mfu") is not None:
        parts.append(f"MFU {m['mfu']:.1%}")
    if m.get("loss_scale", 1.0) != 1.0:
        parts.append(f"scale {m['loss_scale']:g}")
    parts.append(f"{m['memory'] / 2**20:,.0f} MiB")
    parts.append(f"left {left}")
    return "  ".join(parts)
