"""One save on one rank. Ranks agree through files in the checkpoint folder alone: no collective runs beside the training's.

every rank: step-N.<attempt>.tmp/rank-R.bin, rank-R.json, then rank-R.done, or rank-R.failed with the reason
rank 0:     waits for all; index.json, summary.json; renames the folder to step-N; moves `latest`
            or, after a failure: step-N.<attempt>.failed with the reasons, and removes the folder
others:     wait for either
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import torch

from partita import __version__
from partita.errors import CheckpointError
from partita.train.index import (
    BEST,
    FORMAT,
    INDEX,
    LATEST,
    SUMMARY,
    VERSION,
    CheckpointInfo,
    list_checkpoints,
    merge,
    rank_name,
    shard_name,
    step_name,
)
from partita.train.shards import write_shard
from partita.train.snapshot import Snapshot
from partita.train.storage import free_bytes, read_sealed, replace_text, sync_folder, write_sealed, write_text

log = logging.getLogger("partita")
MARGIN = 64 * 1024  # bytes of documents beside a shard, kept free
BEAT = 1.0  # seconds between signs of life of rank 0's wait
JOIN = 45.0  # seconds in which every rank must have called `save`
GONE = 10.0  # seconds after which a folder that vanished without an outcome counts as a failure


class Abandoned(Exception):
    """Another rank has failed: what this one writes is of no use."""


@dataclass
class Save:
    """One attempt to save `step`; `attempt` is a name that all ranks know and no other attempt has.

    patience: seconds without any progress of the others after which they count as lost. stop: set to give up early.
    caller: file and line that asked for the save. join: seconds in which all ranks must have asked.
    """

    folder: Path
    step: int
    attempt: str
    rank: int
    world: int
    keep: int
    keep_best: int
    patience: float
    stop: Event = field(default_factory=Event)
    caller: str = "?"
    join: float = JOIN
    _failure: str = ""
    _beaten: float = 0.0

    @property
    def final(self) -> Path:
        """Where the checkpoint will be."""
        return self.folder / step_name(self.step)

    @property
    def temporary(self) -> Path:
        """Where it is being written."""
        return self.folder / f"{self.final.name}.{self.attempt}.tmp"

    @property
    def outcome(self) -> Path:
        """Where rank 0 says why it failed."""
        return self.folder / f"{self.final.name}.{self.attempt}.failed"

    @property
    def _aside(self) -> Path:
        """Where a checkpoint of the same step waits until this one has its place."""
        return self.final.with_name(self.final.name + ".old")

    def run(self, take: Callable[[], Snapshot]) -> None:
        """Write this rank's part, and wait until the checkpoint is complete. Raises CheckpointError, the same on all ranks."""
        snapshot = None
        try:
            snapshot = take()
            self._write(snapshot)
        except Abandoned:
            log.debug("rank %d gave up its part of step %d: another rank has failed", self.rank, self.step)
        except Exception as error:
            self._report(error, snapshot)
        if self.rank == 0:
            self._conclude(snapshot)
        else:
            self._follow()

    # ------------------------------------------------------------------ every rank

    def _write(self, snapshot: Snapshot) -> None:
        """This rank's files, the marker last."""
        self._check()
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._marker("begun").touch()
        needed, free = snapshot.data.numel() + MARGIN, free_bytes(self.temporary)
        if needed > free:
            raise OSError(errno.ENOSPC, "not enough space")
        sums = write_shard(self.temporary / shard_name(self.rank), snapshot.data, self._check)
        own = {"attempt": self.attempt, "rank": self.rank, "sums": sums, "rank_extra": snapshot.rank_extra}
        write_sealed(self.temporary / rank_name(self.rank), own)
        new = self.temporary / f"rank-{self.rank:05d}.new"
        write_sealed(new, {"size": snapshot.data.numel(), "parts": snapshot.parts}, durable=False)  # it goes when all are done
        os.replace(new, self._marker("done"))  # rank 0 sees it whole

    def _check(self) -> None:
        """Between chunks: stop writing where it is of no use any more; rank 0 gives a sign of life."""
        if self.stop.is_set() or self.outcome.exists():
            raise Abandoned
        self._beat()

    def _beat(self) -> None:
        """The others see rank 0's life in the folder's time, which changes at least every BEAT seconds."""
        now = time.monotonic()
        if self.rank == 0 and now - self._beaten > BEAT:
            self._beaten = now
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.temporary)

    def _marker(self, kind: str, rank: int | None = None) -> Path:
        return self.temporary / f"rank-{self.rank if rank is None else rank:05d}.{kind}"

    def _report(self, error: Exception, snapshot: Snapshot | None) -> None:
        """Tell rank 0 why this rank failed; its own shard is removed first, so that there is room to say so."""
        if self.outcome.exists():
            return  # the folder went away because another rank failed earlier
        self._failure = self._reason(error, snapshot)
        try:
            self.temporary.mkdir(parents=True, exist_ok=True)
            (self.temporary / shard_name(self.rank)).unlink(missing_ok=True)
            _leave(self._marker("failed"), self._failure)
        except OSError as second:
            log.error("%s; the other ranks can't be told: %s", self._failure, second)

    def _reason(self, error: Exception, snapshot: Snapshot | None) -> str:
        path = self.temporary / shard_name(self.rank)
        if not isinstance(error, OSError) or snapshot is None:
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            return f"rank {self.rank}: {kind}{error}"
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{free_bytes(self.folder):,}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "no space left on the device" if full else f"{error.strerror or error}"
        remedy = " (make room there, lower train.keep, or move run.dir)" if full else ""
        return f"rank {self.rank}: {why}: {path} needs {snapshot.data.numel() + MARGIN:,} bytes, {free} are free{remedy}"

    def _alone(self, absent: list[int]) -> str:
        return (
            f"rank {self.rank} called save at {self.caller}, and ranks {absent[:8]} have not within {self.join:.0f} s; "
            "every rank must call it (take it out of `if rank == 0`): each one holds a part of the state"
        )

    def _error(self, reasons: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {self.step} could not be written to {self.final}: {reasons}. "
            "Older checkpoints and `latest` are as they were; with train.on_save_error=warn training goes on."
        )

    # ------------------------------------------------------------------ all but rank 0

    def _follow(self) -> None:
        """Wait for what rank 0 decides."""
        begun = time.monotonic()
        beat, seen = -1.0, begun
        rank0 = False
        for _ in _ticks(self.world):
            rank0 = rank0 or self._marker("begun", 0).exists()
            if self._succeeded():
                return
            if self.outcome.exists():
                self._discard_own()
                raise self._error(_text(self.outcome) or "the reason could not be written, rank 0's log has it")
            if self.stop.is_set():
                raise self._error(f"rank {self.rank} was stopped before rank 0 had completed it")
            now, mtime = time.monotonic(), _mtime(self.temporary)
            if not rank0 and now - begun > self.join and mtime:
                raise self._error(self._alone([0]))
            if mtime != beat:
                beat, seen = mtime, now
            if now - seen > (self.patience if mtime else min(GONE, self.patience)):
                raise self._error(f"rank 0 has shown no sign of life for {now - seen:.0f} s")

    def _succeeded(self) -> bool:
        """The folder has its name, it is of this attempt, and `latest` has moved."""
        summary = self.final / SUMMARY
        if not summary.exists() or _text(self.folder / LATEST) != self.final.name:
            return False
        try:
            return bool(read_sealed(summary)["attempt"] == self.attempt)
        except CheckpointError:  # an older folder of this name, which is being replaced just now
            return False

    def _discard_own(self) -> None:
        """Remove what this rank may have written after rank 0 removed the folder."""
        markers = [self._marker(kind).name for kind in ("begun", "done", "failed")]
        for name in (shard_name(self.rank), rank_name(self.rank), *markers):
            (self.temporary / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # absent, or another rank's files are in it: it removes them
            self.temporary.rmdir()

    # ------------------------------------------------------------------ rank 0

    def _conclude(self, snapshot: Snapshot | None) -> None:
        """Wait for all ranks, then complete the checkpoint or withdraw it."""
        try:
            self._gather()
            assert snapshot is not None  # rank 0's own marker says so
            self._commit(snapshot)
        except Exception as error:
            reasons = str(error) if isinstance(error, CheckpointError) else self._reason(error, snapshot)
            self._withdraw(reasons)
            raise self._error(reasons) from error
        try:
            remove_folder(self._aside)
            tidy(self.folder, self.keep, self.keep_best, self.attempt)
        except (OSError, CheckpointError) as error:
            log.warning("the checkpoint of step %d is complete, but older ones could not be removed: %s", self.step, error)

    def _gather(self) -> None:
        """Return when all ranks are done. Raises CheckpointError where one failed or does nothing for `patience` seconds."""
        begun = time.monotonic()
        state, seen, looked = None, begun, 0.0
        for _ in _ticks(self.world):
            if self._failure:
                raise CheckpointError(self._failure)
            names = set(os.listdir(self.temporary)) if self.temporary.is_dir() else set()
            failed = sorted(n for n in names if n.endswith(".failed"))
            if failed:
                reasons = [_text(self.temporary / n) or f"{n[:-7]}: its log has the reason" for n in failed]
                raise CheckpointError("; ".join(reasons))
            missing = [r for r in range(self.world) if self._marker("done", r).name not in names]
            if not missing:
                return
            if self.stop.is_set():
                raise CheckpointError(f"the save was stopped while it waited for ranks {missing[:8]}")
            now = time.monotonic()
            absent = [r for r in missing if self._marker("begun", r).name not in names]
            if absent and now - begun > self.join:
                raise CheckpointError(self._alone(absent))
            self._beat()
            if now - looked > BEAT:
                looked, last = now, state
                state = _sizes(self.temporary)
                seen = now if state != last else seen
            if now - seen > self.patience:
                raise CheckpointError(f"ranks {missing[:8]} have written nothing for {now - seen:.0f} s")

    def _commit(self, snapshot: Snapshot) -> None:
        """The point of no return is one rename; whatever could lack space comes before it."""
        reports = [read_sealed(self._marker("done", r)) for r in range(self.world)]
        sizes = [r["size"] for r in reports]
        self._check_files(sizes)
        head = {"format": FORMAT, "version": VERSION, "step": self.step, "attempt": self.attempt, "world": self.world}
        serial = 1 + max((i.serial for i in list_checkpoints(self.folder)), default=0)
        versions = {"partita": __version__, "torch": torch.__version__}
        own = {"plan": snapshot.plan, "versions": versions, "extra": snapshot.extra, "sizes": sizes, "tensors": merge(reports)}
        write_sealed(self.temporary / INDEX, head | own)
        saved = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"serial": serial, "score": snapshot.score, "saved": saved, "bytes": sum(sizes)}
        write_sealed(self.temporary / SUMMARY, head | line)
        for rank in range(self.world):
            self._marker("begun", rank).unlink(missing_ok=True)
            self._marker("done", rank).unlink()
        sync_folder(self.temporary)
        pointer = self.folder / f"{LATEST}.new"
        write_text(pointer, self.final.name + "\n")
        self._rename()
        os.replace(pointer, self.folder / LATEST)
        sync_folder(self.folder)

    def _check_files(self, sizes: list[int]) -> None:
        """What the ranks say they wrote is there: nobody has touched the folder meanwhile."""
        for rank, size in enumerate(sizes):
            there = (self.temporary / shard_name(rank)).stat().st_size
            if there != size or not (self.temporary / rank_name(rank)).is_file():
                raise CheckpointError(
                    f"{shard_name(rank)} has {there:,} bytes, {size:,} were written: something else changes the folder"
                )

    def _rename(self) -> None:
        """Give the folder its name; one that has it already steps aside, and back should the machine stop in between."""
        if self.final.exists():
            remove_folder(self._aside)
            os.rename(self.final, self._aside)
        os.rename(self.temporary, self.final)
        sync_folder(self.folder)

    def _withdraw(self, reasons: str) -> None:
        """Tell the other ranks, then remove what has been written. A full disk may need it the other way round."""
        try:
            if self.world > 1:
                replace_text(self.outcome, reasons)
        except OSError:
            remove_folder(self.temporary)
            try:
                _leave(self.outcome, reasons)
            except OSError as error:
                log.error("the other ranks can't be told that the checkpoint of step %d failed: %s", self.step, error)
        remove_folder(self.temporary)
        if self._aside.exists() and not self.final.exists():
            os.rename(self._aside, self.final)


# ------------------------------------------------------------------ the folder


def recover(folder: Path) -> None:
    """Put a folder in order in which an earlier process was killed. Rank 0 calls it before any rank saves."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(".old") and path.is_dir():
            final = path.with_suffix("")
            remove_folder(path) if final.exists() else os.rename(path, final)
        elif path.name.endswith((".tmp", ".failed", ".new")) and path.name.startswith(("step-", LATEST, BEST)):
            remove_folder(path)


def tidy(folder: Path, keep: int, keep_best: int, attempt: str) -> None:
    """Remove checkpoints that are neither among the `keep` saved last nor the `keep_best` of lowest score; write best.json.

    Order is that of saving, not of steps: after a return to an earlier step the new checkpoints are the newest.
    """
    for path in folder.iterdir():
        if _earlier(path.name, attempt):  # all ranks have seen how it ended, or they would not have taken part in this one
            remove_folder(path)
    found = list_checkpoints(folder)[::-1]
    scored = sorted((i for i in found if i.score is not None), key=lambda i: (i.score, -i.serial))
    kept = {i.path for i in found[:keep]} | {i.path for i in scored[:keep_best]}
    for info in found:
        if info.path not in kept:
            remove_checkpoint(info.path)
    _write_best(folder, [i for i in scored if i.path in kept][: max(1, keep_best)])


def _earlier(name: str, attempt: str) -> bool:
    """Is this a file or folder of an earlier attempt of this start? (Of a later one there may be some: other ranks may be ahead.)"""
    found = re.fullmatch(r"step-\d+\.(\w+)-(\d+)\.(tmp|failed)", name)
    life, number = attempt.rsplit("-", 1)
    return found is not None and found[1] == life and int(found[2]) < int(number)


def _write_best(folder: Path, best: list[CheckpointInfo]) -> None:
    if best:
        rows = [{"name": i.path.name, "step": i.step, "score": i.score} for i in best]
        replace_text(folder / BEST, json.dumps({"best": rows}, indent=1) + "\n")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that it is never half there under its name."""
    aside = path.with_name(path.name + ".removed.tmp")
    remove_folder(aside)
    os.rename(path, aside)
    remove_folder(aside)


def remove_folder(path: Path) -> None:
    """Remove a folder or file that may be absent, while others may still write into it (then the rest goes at the next start)."""
    if path.is_file():
        path.unlink(missing_ok=True)
        return
    for _ in range(5):
        if not path.exists():
            return
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        log.warning("%s could not be removed completely", path)


def _ticks(world: int) -> Iterator[None]:
    """Wait a little longer each time: from 2 to 10 ms, or 100 ms where many ranks ask the same file system."""
    pause, longest = 0.002, 0.01 if world <= 16 else 0.1
    while True:
        yield
        time.sleep(pause)
        pause = min(longest, pause * 1.2)


def _leave(path: Path, text: str) -> None:
    """Leave a message for other ranks. An empty file needs no block of its own: that works on a full disk, too."""
    try:
        replace_text(path, text)
    except OSError:
        path.touch()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _sizes(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times below a folder: changes when anybody writes."""
    out = []
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat()
                out.append((entry.name, found.st_size, found.st_mtime_ns))
    return tuple(sorted(out))
