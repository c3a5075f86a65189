"""A thread on each rank that looks at all of them once a second; the lowest rank that is alive writes the report."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partita.errors import CheckpointError
from partita.runtime import phase
from partita_diagnosis.beat import Beat, State
from partita_diagnosis.report import Report

TICK = 0.5  # seconds between looks
DEAD = 3.0  # seconds without a beat after which a process does not run


class Monitor(threading.Thread):
    """Watches for hangs, slow saves, damaged checkpoints, jumps of the clock, and the host's memory."""

    def __init__(self, run: Any, beat: Beat, report: Report) -> None:
        super().__init__(daemon=True, name="partita-diagnosis")
        self._run, self._beat, self._report, self._config = run, beat, report, run.config.diagnosis
        self._main = threading.main_thread().ident or 0
        self._over = threading.Event()
        now = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> (beat, when it last changed)
        self._progress: tuple[list[tuple[int, int]], float] = ([], now)
        self._clock = time.time() - now
        self._dumped = self._hung = False
        self._verified: dict[Path, float] = {}  # checkpoints that have been read -> when last
        self.parts: list[Callable[[float, list[State]], None]] = [
            self._hang, self._save, self._verify, self._wall_clock, self._memory,
        ]  # fmt: skip

    def run(self) -> None:
        """Until stopped."""
        while not self._over.wait(TICK):
            self._beat.beat += 1
            self._beat.write()
            states, now = self._beat.all(), time.monotonic()
            for rank, state in enumerate(states):
                if self._seen.get(rank, (-1, 0.0))[0] != state.beat:
                    self._seen[rank] = (state.beat, now)
            for part in self.parts:
                part(now, states)

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(2.0)

    def _reports(self, now: float) -> bool:
        """Whether this rank is the lowest that is alive."""
        return all(not self._alive(rank, now) for rank in range(self._beat.rank))

    def _alive(self, rank: int, now: float) -> bool:
        return now - self._seen.get(rank, (0, 0.0))[1] < DEAD

    # ------------------------------------------------------------------ hang

    def _hang(self, now: float, states: list[State]) -> None:
        if (self._beat.folder / "dump").exists() and not self._dumped:
            self._dumped = True
            self._dump()
        marks = [(s.step, s.calls) for s in states]
        if marks != self._progress[0]:
            self._progress = (marks, now)
            return
        quiet = now - self._progress[1]
        if quiet < self._config.hang_after or self._hung or not any(s.step for s in states) or not self._reports(now):
            return
        self._hung = True
        (self._beat.folder / "dump").touch()
        time.sleep(3 * TICK)
        self._tell_hang(quiet, now, states)

    def _dump(self) -> None:
        """Stacks of all threads, and in one line where the main one is."""
        with (self._beat.folder / f"stacks-{self._beat.rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        inner = next((f for f in reversed(frames) if "/torch/" not in f.filename and "diagnosis" not in f.filename), frames[-1])
        place = f"{inner.name} ({Path(inner.filename).name}:{inner.lineno})"
        (self._beat.folder / f"where-{self._beat.rank}.txt").write_text(place)

    def _tell_hang(self, quiet: float, now: float, states: list[State]) -> None:
        dead = [r for r in range(len(states)) if not self._alive(r, now)]
        absent = dead or [r for r, s in enumerate(states) if not s.waiting]
        fewest = min(s.calls for s in states)
        if not absent or len(absent) == len(states):
            absent = [r for r, s in enumerate(states) if s.calls == fewest and s.calls < max(t.calls for t in states)]
        words = "; ".join(self._words(rank, state, rank in dead) for rank, state in enumerate(states[:16]))
        who = f"rank {', '.join(map(str, absent))}" if absent else "no single rank"
        cause = f"no progress for {quiet:.0f} s; {who} does not come to the collective that the others wait in. {words}"
        step = max(s.step for s in states)
        stacks = [str(p) for p in sorted(self._beat.folder.glob("stacks-*.txt"))]
        self._report.add("hang", step, cause, about=absent, stacks=stacks)
        if self._config.on_hang == "stop":
            for rank in absent:
                if states[rank].pid and states[rank].pid != os.getpid():
                    os.kill(states[rank].pid, signal.SIGKILL)

    def _words(self, rank: int, state: State, dead: bool) -> str:
        at = f"step {state.step}, after collective {state.calls} ({state.last or 'none'})"
        if dead:
            return f"rank {rank}: {at}, its process {_process_state(state.pid)}"
        where = self._beat.folder / f"where-{rank}.txt"
        place = f", in {where.read_text()}" if where.exists() else ""
        return f"rank {rank}: {at}, {'waiting in it' if state.waiting else 'not in a collective'}{place}"

    # ------------------------------------------------------------------ checkpoints

    def _save(self, now: float, states: list[State]) -> None:
        """A save that goes on and on: which rank's shard is late."""
        folder = self._run.checkpoints.dir
        if not self._reports(now) or not folder.is_dir():
            return
        for path in folder.glob("step-*.tmp"):
            begun = list(path.glob("rank-*.begun"))
            age = time.time() - min((p.stat().st_mtime for p in begun), default=time.time())
            late = [int(p.name[5:10]) for p in begun if not p.with_suffix(".done").exists()]
            if age > self._config.slow_save and late:
                size = sum(p.stat().st_size for p in path.glob("rank-*.bin"))
                step = int(path.name.split(".")[0].split("-")[1])
                cause = (
                    f"the save of step {step} has taken {age:.0f} s so far and rank {', '.join(map(str, late))} still writes to {path.parent} "
                    f"({size / age / 1e6:.2f} MB/s over all ranks): the disk is slow"
                )
                self._report.add("disk", step, cause, about=late)

    def _verify(self, now: float, states: list[State]) -> None:
        """A checkpoint that can't be read back."""
        if not self._config.verify_every or not self._reports(now):
            return
        from partita.train.checkpoint import verify

        path = self._to_verify(now)
        if path is None:
            return
        self._verified[path] = now
        try:
            verify(path)
        except CheckpointError as error:
            if path.exists():  # not one that was removed meanwhile
                self._report.add("checkpoint", self._run.step, f"{error}", about=str(path))

    def _to_verify(self, now: float) -> Path | None:
        """The newest where it was never read; else, when it is time again, the one that was read longest ago or never."""
        there = sorted(p for p in self._run.checkpoints.dir.glob("step-*") if not p.suffix)  # whole ones have a plain name
        self._verified = {p: t for p, t in self._verified.items() if p in there}
        if there and there[-1] not in self._verified:
            return there[-1]
        if there and now - max(self._verified.values()) >= self._config.verify_every:
            return min(there, key=lambda p: self._verified.get(p, -math.inf))
        return None

    # ------------------------------------------------------------------ the machine

    def _wall_clock(self, now: float, states: list[State]) -> None:
        jump = time.time() - now - self._clock
        if abs(jump) > 2.0:
            self._clock += jump
            cause = f"the wall clock of rank {self._beat.rank} jumped by {jump:+.1f} s; times in its files are not comparable"
            self._report.add("clock", self._run.step, cause, about=self._beat.rank, seconds=jump)

    def _memory(self, now: float, states: list[State]) -> None:
        free = host_free()
        if free is not None and free < self._config.host_reserve and self._reports(now):
            cause = f"{free:.1%} of the host's memory is free, less than diagnosis.host_reserve={self._config.host_reserve:.1%}"
            self._report.add(
                "memory", self._run.step, f"{cause}; saving and leaving before the system kills a rank", about="host"
            )
            if phase.current.phase == "train":
                os.kill(os.getpid(), signal.SIGTERM)
                self.parts.remove(self._memory)


def _process_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "is gone"
    return {"T": "is stopped (SIGSTOP)", "t": "is held by a debugger", "D": "waits for a disk", "Z": "has ended"}.get(
        letter, "does not answer"
    )


def host_free() -> float | None:
    """Share of memory that can still be had: of the machine, or of the control group where that is smaller. None: not known."""
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        share = int(rows["MemAvailable"].split()[0]) / int(rows["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        return min(share, 1 - used / int(limit)) if limit != "max" else share
    except (OSError, ValueError):
        return share
