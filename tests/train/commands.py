"""Runs the command line as a user does, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

import forked

ROOT = Path(__file__).parents[2]
TINY = (
    "model.layers=2", "model.width=32", "model.heads=2", "data=synthetic", "data.limit=20000", "data.sequence=16", "train.global_batch=8",
    "train.steps=12", "train.sample=0", "tracker=none", "launch.threads=1", "train.eval_at_end=false",
)  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    """Without the traces of an outer launcher."""
    clean = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    }
    return {**clean, "WANDB_SILENT": "true", **changes}


def train(
    folder: Path, *overrides: str, timeout: float = 120, check: bool = True, fresh: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """`scripts/train.py run.dir=folder ...` with tiny settings; the output is text. fresh: in a new interpreter."""
    return script("train.py", f"run.dir={folder}", *TINY, *overrides, timeout=timeout, check=check, fresh=fresh, **env)


def script(
    name: str, *arguments: str, timeout: float = 170, check: bool = True, fresh: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """A script of scripts/ with its arguments, to its end. Raises subprocess.TimeoutExpired, and ends what it has started then."""
    command = [str(ROOT / "scripts" / name), *arguments]
    with tempfile.TemporaryDirectory(prefix="partita_test_") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = forked.start(command, out=out, err=err, env=environment(**env), cwd=ROOT, fresh=fresh)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired as late:
            end_session(process.pid)
            raise subprocess.TimeoutExpired(late.cmd, timeout, out.read_text(), err.read_text()) from None
        done = subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())
    if check:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def start(folder: Path, *overrides: str) -> forked.Forked:
    """The same in the background, in a session of its own; what it says goes to a file beside the folder."""
    command = [str(ROOT / "scripts" / "train.py"), f"run.dir={folder}", *TINY, *overrides]
    return forked.start(command, out=folder.parent / f"{folder.name}.out", env=environment(), cwd=ROOT)


def end_session(pid: int) -> None:
    """Kill all that is left of a session."""
    for member in session_members(pid):
        os.kill(member, signal.SIGKILL)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of training steps."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [m for m in lines if "loss" in m]


def column(folder: Path, name: str) -> list[float]:
    """One value of each step."""
    return [m[name] for m in metrics(folder)]


def wait_for_step(folder: Path, step: int, process: forked.Forked, timeout: float = 60) -> None:
    """Until metrics.jsonl has that step."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            if any(m["step"] >= step for m in metrics(folder)):
                return
        except (json.JSONDecodeError, KeyError):
            pass
        assert process.poll() is None, (folder.parent / f"{folder.name}.out").read_text()[-3000:]
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {timeout} s")


def session_members(pid: int) -> list[int]:
    """Living processes of the session that `start` made."""
    alive = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == pid and fields[0] != "Z":
                alive.append(int(name))
    return alive


def ranks_of(process: forked.Forked) -> list[int]:
    """Process ids of the ranks, lowest first."""
    return sorted(p for p in session_members(process.pid) if p != process.pid)


def assert_gone(pid: int, timeout: float = 10) -> None:
    """No process of the session is left."""
    end = time.monotonic() + timeout
    while left := session_members(pid):
        if time.monotonic() > end:
            end_session(pid)
            raise AssertionError(f"processes left: {left}")
        time.sleep(0.1)
