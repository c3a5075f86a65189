"""Random kills of a small run that saves every 5 steps: nothing that was saved may be lost, and nothing may be left behind.

python scripts/bench/kills.py --kills 20                # a table; exit status 1 at any violation
python scripts/bench/kills.py --kills 200 --full 0.1    # a tenth of them on a disk that is full

A *life* is one start of the command; it is killed (kill -9 of a random rank, or of the launcher) at a random moment: while it starts,
trains, or saves. The next life goes on in the same folder. A folder that reaches the last step is compared with a run that was never
killed: losses of every step and the weights at the end must be equal to the bit.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "train"))

from commands import session_members  # type: ignore[import-not-found]

from partita.errors import CheckpointError
from partita.train.checkpoint import latest_in, list_checkpoints, read_weights, verify

SHM = Path("/dev/shm")
STEPS = 120
TINY = (
    "model.layers=2", "model.width=32", "model.heads=2", "data=synthetic", "data.limit=20000", "data.sequence=16",
    "train.global_batch=8", f"train.steps={STEPS}", "train.save_every=5", "train.sample=0", "tracker=none", "launch.threads=1",
    "train.eval_at_end=false", "train.on_save_error=warn", "model.dropout=0.1",
)  # fmt: skip
SMALL = 16 << 20  # bytes of the small disk
PATIENCE = 15.0  # seconds in which everything must be gone after a kill


@dataclass
class Life:
    """One start that was killed, and what was wrong afterwards."""

    number: int
    victim: str
    moment: str
    full: bool
    status: int = 0
    seconds_to_end: float = 0.0
    step: int = 0
    saved: int = 0
    wrong: list[str] = field(default_factory=list)


class Runner:
    """Starts runs as `scripts/train.py` would, in processes forked from this one, which has made all imports: a life costs a second."""

    def __init__(self, overrides: list[str], fork: bool) -> None:
        self.overrides, self.fork = overrides, fork
        if fork:  # make a plan, for the imports that it makes
            import partita.train.loop  # noqa: F401
            from partita.cli import plan

            with redirect_stdout(io.StringIO()):
                plan([*TINY, *overrides])

    def start(self, folder: Path, limit: int = 0) -> int:
        """Process id of the launcher, which leads a session of its own. limit: bytes of the largest file it may write; 0: no limit."""
        argv = [f"run.dir={folder}", *TINY, *self.overrides]
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            log = os.open(f"{folder}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["TMPDIR"], tempfile.tempdir = str(temporary(folder)), None
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            if not self.fork:
                script = Path(__file__).parents[1] / "train.py"
                os.execv(sys.executable, [sys.executable, str(script), *argv])
            from partita.cli import train

            status = train(argv)
            sys.stdout.flush()
            os._exit(status)
        finally:
            os._exit(70)

    def whole(self, folder: Path) -> int:
        """Run to the end; returns the exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.start(folder), 0)[1])


def temporary(folder: Path) -> Path:
    """The folder for temporary files of the runs beside `folder`."""
    path = folder.parent / "temporary"
    path.mkdir(exist_ok=True)
    return path


# ------------------------------------------------------------------ processes


def wait_for_end(pid: int) -> tuple[int | None, float, list[int]]:
    """(exit status or None, seconds, processes left) of a session whose member was killed; those left are ended."""
    begun, status = time.monotonic(), None
    while time.monotonic() - begun < PATIENCE:
        if status is None:
            done, raw = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(raw) if done else None
        if status is not None and not session_members(pid):
            return status, time.monotonic() - begun, []
        time.sleep(0.01)
    left = session_members(pid)
    for p in left:
        os.kill(p, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status, time.monotonic() - begun, left


# ------------------------------------------------------------------ moments


def saving(folder: Path) -> bool:
    """Whether a save is under way."""
    try:
        return any(name.endswith((".tmp", ".old", ".new")) for name in os.listdir(folder / "checkpoints"))
    except OSError:
        return False


def wait_for_moment(moment: str, folder: Path, pid: int, rng: random.Random) -> None:
    """Sleep until the moment has come, or the run has ended."""
    end = time.monotonic() + 20
    if moment == "start":
        time.sleep(rng.random() * 1.0)
        return
    before = size(folder / "metrics.jsonl")
    while time.monotonic() < end and alive(pid):
        moved = size(folder / "metrics.jsonl") not in (0, before)
        if moved and (moment == "train" or saving(folder)):
            break
        time.sleep(0.0005)
    time.sleep(rng.random() * (0.3 if moment == "train" else 0.01))


def alive(pid: int) -> bool:
    """Whether a child has not ended yet (it is not reaped)."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def size(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def strike(victim: str, pid: int, rng: random.Random) -> str:
    """Kill; returns who was hit (the launcher where there are no ranks yet)."""
    ranks = [p for p in session_members(pid) if p != pid]
    if victim == "rank" and ranks:
        os.kill(rng.choice(ranks), signal.SIGKILL)
        return "rank"
    os.kill(pid, signal.SIGKILL)
    return "launcher"


# ------------------------------------------------------------------ what must hold


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss; a torn last line is passed over."""
    out = {}
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if "loss" in row:
            out[row["step"]] = row["loss"]
    return out


def newest(folder: Path) -> int:
    """Step of the newest checkpoint; 0 without one."""
    found = latest_in(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    return int(found.name.split("-")[1]) if found else 0


def check(life: Life, folder: Path, reference: dict[int, float], before: int, shm: set[str]) -> None:
    """Everything that must hold after a kill; what doesn't goes into `life.wrong`."""
    got = losses(folder)
    life.step, life.saved = max(got, default=0), newest(folder)
    different = [s for s, loss in got.items() if loss != reference.get(s)]
    if different:
        life.wrong.append(f"the loss of step {different[0]} differs")
    if life.saved < before:
        life.wrong.append(f"the checkpoint of step {before} is lost: the newest is {life.saved}")
    shown = list((folder / "checkpoints").glob("step-????????"))
    if len(shown) != len(list_checkpoints(folder)):
        life.wrong.append("a folder looks like a checkpoint and is none")
    for path in shown:
        try:
            verify(path)
        except CheckpointError as error:
            life.wrong.append(str(error))
    new = set(os.listdir(SHM)) - shm if SHM.is_dir() else set()
    if new:
        life.wrong.append(f"left in {SHM}: {', '.join(sorted(new)[:3])}")
    if left := sorted(os.listdir(temporary(folder))):
        life.wrong.append(f"left in the folder for temporary files: {', '.join(left[:3])}")


def same_end(folder: Path, reference: Path, expected: dict[int, float]) -> list[str]:
    """What differs between a run that was killed again and again and one that was not."""
    wrong = []
    if losses(folder) != expected:
        wrong.append("losses differ from the uninterrupted run's")
    ours, theirs = read_weights(folder), read_weights(reference)
    if ours.keys() != theirs.keys() or any(not torch.equal(ours[n], theirs[n]) for n in theirs):
        wrong.append("the last weights differ from the uninterrupted run's")
    return wrong


# ------------------------------------------------------------------ a disk that gets full


@contextmanager
def small_disk(wanted: bool) -> Any:
    """(folder, whether it is a file system of its own): a tmpfs where mounting is permitted."""
    with tempfile.TemporaryDirectory(prefix="partita_kills_") as scratch:
        mounted = wanted and _quiet(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", scratch])
        try:
            yield Path(scratch), mounted
        finally:
            if mounted:
                _quiet(["umount", scratch]) or _quiet(["umount", "-l", scratch])


def _quiet(command: list[str]) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


def fill(disk: Path, spare: int) -> Path:
    """A file that leaves `spare` bytes free."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - spare))
    return ballast


# ------------------------------------------------------------------ main


def one_life(number: int, runner: Runner, folder: Path, reference: dict[int, float], rng: random.Random, args: Any) -> Life:
    """Start, kill, check. args: command line, `disk` (the small one, or None)."""
    victim, moment = rng.choice(("rank", "launcher")), rng.choice(("start", "train", "save", "save"))
    full = rng.random() < args.full
    before, shm = newest(folder), set(os.listdir(SHM)) if SHM.is_dir() else set()
    ballast = fill(args.disk, rng.randrange(4096, 300_000)) if full and args.disk else None
    pid = runner.start(folder, limit=60_000 if full and args.disk is None else 0)
    wait_for_moment("train" if full and moment == "save" else moment, folder, pid, rng)
    ended = not alive(pid)
    hit = "none: it had ended" if ended else strike(victim, pid, rng)
    life = Life(number, hit, moment, full)
    status, life.seconds_to_end, left = wait_for_end(pid)
    life.status = -1 if status is None else status
    if ballast is not None:
        ballast.unlink()
    if left:
        life.wrong.append(f"{len(left)} processes were left after {PATIENCE:.0f} s")
    if ended and life.status not in ((0, 1) if full else (0,)):
        life.wrong.append(f"ended by itself with status {life.status}")
    check(life, folder, reference, before, shm)
    return life


def main() -> int:
    """Kill, check, print; 1 at any violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--full", type=float, default=0.1, help="share of lives on a full disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exec", action="store_true", help="start a new interpreter for each life (slower by its imports)")
    parser.add_argument("overrides", nargs="*", default=[], help="more of the command line, e.g. +strategy=zero3")
    args = parser.parse_args()
    torch.set_num_threads(1)  # this process forks
    rng, runner = random.Random(args.seed), Runner([*args.overrides] or ["parallel.data=2"], fork=not args.exec)
    lives: list[Life] = []
    wrong: list[str] = []
    begun = time.monotonic()
    with small_disk(args.full > 0) as (scratch, mounted):
        args.disk = scratch if mounted else None
        if runner.whole(scratch / "whole"):
            print((scratch / "whole.out").read_text()[-3000:])
            return 1
        expected = losses(scratch / "whole")
        chain = 0
        while len(lives) < args.kills or newest(scratch / f"run{chain}") < STEPS:
            folder = scratch / f"run{chain}"
            if len(lives) >= args.kills:
                if runner.whole(folder):
                    wrong.append(f"run {chain} could not be finished: {(scratch / f'run{chain}.out').read_text()[-2000:]}")
                    break
                continue
            if newest(folder) < STEPS:
                lives.append(one_life(len(lives) + 1, runner, folder, expected, rng, args))
                show(lives[-1])
                if lives[-1].wrong:
                    print((scratch / f"run{chain}.out").read_text()[-2000:])
                continue
            wrong += same_end(folder, scratch / "whole", expected)
            shutil.rmtree(folder)
            chain += 1
        else:
            wrong += same_end(scratch / f"run{chain}", scratch / "whole", expected)
    return summary(lives, wrong, chain + 1, time.monotonic() - begun, mounted)


def show(life: Life) -> None:
    """One line of the table."""
    if life.number == 1:
        print("kill  victim    moment  disk  exit  gone after  step  saved  wrong")
    line = f"{life.number:4d}  {life.victim[:8]:8s}  {life.moment:6s}  {'full' if life.full else 'free'}  {life.status:4d}"
    print(f"{line}  {life.seconds_to_end:8.2f} s  {life.step:4d}  {life.saved:5d}  {'; '.join(life.wrong) or '-'}", flush=True)


def summary(lives: list[Life], wrong: list[str], chains: int, seconds: float, mounted: bool) -> int:
    """The last lines; returns the exit status."""
    bad = sum(bool(life.wrong) for life in lives)
    who = ", ".join(f"{count} {name}" for name, count in sorted(Counter(life.victim for life in lives).items()))
    full = sum(life.full for life in lives)
    how = "small tmpfs" if mounted else "limit on the size of files"
    print(
        f"{len(lives)} kills ({who}; {full} with a full disk: {how}) of {chains} runs in {seconds:.0f} s: {bad + len(wrong)} violations"
    )
    for line in wrong:
        print("  " + line)
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
