"""One W&B run, fed by a thread: neither importing wandb nor its start keeps training waiting."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("partita")
AXIS = "global_step"
CLOSING = {True: 60.0, False: 10.0}  # seconds that the end of a run waits for W&B: after success, and otherwise


class Session:
    """Points are queued from the first call of `log` on; the thread opens the W&B run, then writes them in order.

    open: makes the W&B run. first_step: value of W&B's own step counter for the first point, or None to leave it to W&B.
    Whatever goes wrong is told once in the log, and later points are dropped: training doesn't end for it.
    """

    def __init__(self, open_run: Callable[[], Any], first_step: int | None = None) -> None:
        self._open, self._step = open_run, first_step
        self._points: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._run: Any = None

    def start(self) -> None:
        """Open the W&B run now, in the caller's thread. Raises what W&B raises."""
        self._run = self._open()

    def log(self, point: dict[str, Any]) -> None:
        """Write one point; `step` in it becomes the axis. Returns at once."""
        values = {AXIS if name == "step" else name: value for name, value in point.items()}
        self._put(lambda run: self._write(run, values))

    def _write(self, run: Any, values: dict[str, Any]) -> None:
        # Never the step of training: W&B drops points whose own step goes back, and a resumed run makes steps again.
        step, self._step = self._step, None
        run.log(values) if step is None else run.log(values, step=step, commit=True)

    def draw(self, pictures: Mapping[str, Path]) -> None:
        """Write SVG files by name; W&B shows them as pages."""
        if pictures:
            self._put(lambda run: _draw(run, dict(pictures)))

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Write what is queued and close; waits for it, but not for ever."""
        self._put(lambda run: _close(run, exit_code, summary))
        self._points.put(None)
        assert self._thread is not None
        self._thread.join(CLOSING[exit_code == 0])
        if self._thread.is_alive():
            log.warning("W&B has not finished in time; `wandb sync` can send what is in the run's folder")

    def _put(self, action: Callable[[Any], None]) -> None:
        self._points.put(action)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="partita-wandb", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            if self._run is None:
                self.start()
            while (action := self._points.get()) is not None:
                action(self._run)
        except Exception as error:
            log.warning("W&B has failed, the run goes on without it: %s: %s", type(error).__name__, error)


def _draw(run: Any, pictures: dict[str, Path]) -> None:
    import wandb

    run.log({name: wandb.Html(path.read_text(encoding="utf-8"), data_is_not_path=True) for name, path in pictures.items()})


def _close(run: Any, exit_code: int, summary: dict[str, Any]) -> None:
    run.summary.update(summary)
    run.finish(exit_code=exit_code)
