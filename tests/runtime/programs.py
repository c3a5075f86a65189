"""Programs that tests start: real processes, each ended with all it has started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

import forked

ROOT = Path(__file__).parents[2]
TOYS = Path(__file__).parent / "toys.py"
PATHS = [str(ROOT / name) for name in ("framework", "plugins", "kernels", "conf")]


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a launcher would set, with the source roots on the path."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC", "WANDB_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        own.pop(name, None)
    return {**own, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1", **more}


class Program:
    """One run of `python command...` in its own process group, output in files."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str] | None = None, fresh: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._out, self._err = (folder.parent / f"{folder.name}.{name}" for name in ("out", "err"))
        self.process = forked.start(command, out=self._out, err=self._err, env=env or environment(), session=False, fresh=fresh)
        self.seen: set[psutil.Process] = set()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for a condition; fails when the program ends or time is up."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the program ended with {self.process.returncode}:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"nothing within {seconds} s:\n{self.out}\n{self.err}"
            time.sleep(0.02)
        self.look()

    def at_step(self, step: int) -> None:
        """Wait until rank 0 has made `step`."""
        self.until(lambda: number(self.folder / "step") >= step)

    def look(self) -> set[psutil.Process]:
        """Remember all processes of the program."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= {*psutil.Process(self.process.pid).children(recursive=True)}
        return self.seen

    def status(self, seconds: float) -> int:
        """The exit status, which must come within `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.out}\n{self.err}") from None

    def alive(self, seconds: float = 3.0) -> list[psutil.Process]:
        """Processes that are left after a moment."""
        return psutil.wait_procs(self.seen, timeout=seconds)[1]

    def end(self) -> None:
        """Kill what is left."""
        for process in [*self.look()]:
            if process.is_running():
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def toy(folder: Path, entry: str, fresh: bool = False, **options: object) -> Program:
    """The toy command line. fresh: in a new interpreter."""
    pairs = [f"{key}={value}" for key, value in options.items()]
    return Program([str(TOYS), entry, str(folder), *pairs], folder, fresh=fresh)


def number(path: Path) -> int:
    """The number in a file, 0 where there is none yet."""
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0
