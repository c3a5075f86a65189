"""Checkpoints: each rank writes its own slices, a checkpoint is complete or not there, `latest` moves last.

Format (version 1), one folder `step-00000010` for each checkpoint:

    rank00000.bin    raw little-endian elements of the slices of rank 0, one after the other
    rank00000.json   where each slice lies: key, dtype, shape, lo, hi (row-major elements of the tensor), offset, bytes, crc32; rank_extra
    checkpoint.json  version, step, number of ranks, extra

Nothing is pickled. While it is written the folder is called `step-00000010.tmp`; a rank's index is written last and marks it done.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError
from partita.runtime.mesh import Mesh
from partita.state.slices import StateSlice
from partita.train.storage import VERSION, as_bytes, fsync_folder, read_index, write_json

log = logging.getLogger("partita")
PATIENCE = 300.0  # seconds that a rank waits for the others' parts


class Checkpointer:
    """Saves and loads under `folder`. keep: newest checkpoints kept; keep_best: also those with the lowest score."""

    def __init__(self, folder: Path, mesh: Mesh, *, keep: int = 2, keep_best: int = 0, asynchronous: bool = True) -> None:
        self.folder, self._rank, self._world = folder, mesh.rank, mesh.world
        self._keep, self._keep_best, self._async = max(keep, 1), keep_best, asynchronous
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._staged: dict[tuple[str, int], torch.Tensor] = {}
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob("step-*.tmp"):
                log.info("removing an unfinished checkpoint: %s", stale)
                shutil.rmtree(stale)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        """The newest complete checkpoint, by the file `latest`; None where there is none."""
        pointer = self.folder / "latest"
        if not pointer.exists():
            return None
        path = self.folder / pointer.read_text().strip()
        if not (path / "checkpoint.json").exists():
            raise CheckpointError(f"{pointer} names {path.name}, which is not there. Name a checkpoint with train.resume=PATH.")
        return path

    # ------------------------------------------------------------------ save

    def save(
        self, step: int, slices: Sequence[StateSlice], extra: dict[str, Any], rank_extra: dict[str, Any], score: float | None = None
    ) -> None:
        """Start a checkpoint; every rank calls it. Waits for the one before. Raises CheckpointError if that one failed."""
        self.wait()
        if self.path(step).exists():
            if self._rank == 0:
                log.warning("%s exists and is complete: it stays", self.path(step))
            return
        parts = [(s, self._stage(i, s)) for i, s in enumerate(slices)]
        arguments = (step, parts, extra, rank_extra, score)
        if not self._async:
            self._write(*arguments)
            self.poll()
            return
        self._thread = threading.Thread(target=self._write, args=arguments, name="partita-save")
        self._thread.start()

    def _stage(self, i: int, s: StateSlice) -> torch.Tensor:
        """A copy on the host that training can't change; its memory is used again by the next save."""
        if not self._async and s.data.device.type == "cpu":
            return s.data
        key = (s.key, s.lo)
        held = self._staged.get(key)
        if held is None or held.shape != s.data.shape or held.dtype != s.data.dtype:
            held = self._staged[key] = torch.empty(s.data.shape, dtype=s.data.dtype)
        return held.copy_(s.data)

    def _write(
        self,
        step: int,
        parts: list[tuple[StateSlice, torch.Tensor]],
        extra: dict[str, Any],
        rank_extra: dict[str, Any],
        score: float | None,
    ) -> None:
        working = self.path(step).with_suffix(".tmp")
        try:
            self._write_part(working, parts, rank_extra)
            self._commit(working, step, extra, score)
        except (OSError, CheckpointError) as error:
            self._fail(working, step, parts, error)

    def _write_part(self, working: Path, parts: list[tuple[StateSlice, torch.Tensor]], rank_extra: dict[str, Any]) -> None:
        working.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank:05d}"
        need = sum(t.numel() * t.element_size() for _, t in parts)
        free = shutil.disk_usage(working).free
        if free < need:
            raise OSError(28, f"{need:,} bytes are needed and {free:,} are free")
        entries, offset = [], 0
        with (working / f"{name}.bin").open("wb") as file:
            for s, tensor in parts:
                data = as_bytes(tensor)
                file.write(data)
                entries.append(
                    {
                        "key": s.key,
                        "dtype": str(s.dtype).removeprefix("torch."),
                        "shape": list(s.shape),
                        "lo": s.lo,
                        "hi": s.hi,
                        "offset": offset,
                        "bytes": len(data),
                        "crc32": zlib.crc32(data),
                    }
                )
                offset += len(data)
            file.flush()
            os.fsync(file.fileno())
        write_json(working / f"{name}.json", {"version": VERSION, "slices": entries, "rank_extra": rank_extra})

    def _commit(self, working: Path, step: int, extra: dict[str, Any], score: float | None) -> None:
        """Rank 0 renames when all parts are there; the others wait for that."""
        final, deadline = self.path(step), time.monotonic() + PATIENCE
        names = [f"rank{r:05d}" for r in range(self._world)]
        while True:
            if self._rank and final.exists():
                return
            failed = next((n for n in names if (self.folder / f"failed-{step:08d}-{n}").exists()), None)
            if failed:
                raise CheckpointError(f"{failed} could not write its part: {(self.folder / f'failed-{step:08d}-{failed}').read_text()}")
            if not self._rank and all((working / f"{n}.json").exists() for n in names):
                break
            if time.monotonic() > deadline:
                raise CheckpointError(f"not all ranks wrote their part of {working} in {PATIENCE:.0f} s")
            time.sleep(0.01)
        write_json(working / "checkpoint.json", {"version": VERSION, "step": step, "ranks": self._world, "extra": extra, "score": score})
        fsync_folder(working)
        os.replace(working, final)
        fsync_folder(self.folder)
        pointer = self.folder / "latest.tmp"
        pointer.write_text(final.name)
        os.replace(pointer, self.folder / "latest")
        self._rotate(step)

    def _fail(self, working: Path, step: int, parts: list[tuple[StateSlice, torch.Tensor]], error: Exception) -> None:
        need = sum(t.numel() * t.element_size() for _, t in parts)
        text = str(error)
        marker = self.folder / f"failed-{step:08d}-rank{self._rank:05d}"
        shutil.rmtree(working, ignore_errors=True)
        try:
            marker.write_text(text)
        except OSError:
            log.warning("no room even for %s", marker)
        self._error = CheckpointError(
            f"checkpoint of step {step} not written to {self.path(step)} (this rank needs {need:,} bytes): {text}. "
            "`latest` is unchanged. Free space, or go on without: train.on_save_error=warn."
        )

    def _rotate(self, step: int) -> None:
        """Delete checkpoints that are neither among the newest, nor the best. Later steps of an abandoned try go first."""
        found = {int(p.name[5:]): p for p in self.folder.glob("step-????????") if (p / "checkpoint.json").exists()}
        newest = sorted((s for s in found if s <= step), reverse=True)[: self._keep]
        scored = sorted((json.loads((p / "checkpoint.json").read_text())["score"], s) for s, p in found.items() if _has_score(p))
        keep = {*newest, *(s for _, s in scored[: self._keep_best])}
        for number, path in found.items():
            if number not in keep:
                doomed = path.with_suffix(".tmp")
                os.replace(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        for marker in self.folder.glob("failed-*"):
            marker.unlink(missing_ok=True)

    def poll(self) -> None:
        """Raise CheckpointError if a save in the background has failed."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Let the save in the background end; raises CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def close(self) -> None:
        """Let the save in the background end, whatever came of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------------ load

    def load(
        self, path: Path, slices: Sequence[StateSlice], *, partial: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fill `slices` from any number of ranks' parts. Returns (extra, rank_extra of this rank if the number of ranks is the same).

        Values are converted where the stored dtype differs. Raises CheckpointError for a part that is missing, damaged, or of another
        shape; `partial` leaves slices alone that the checkpoint doesn't have at all.
        """
        index = read_index(path)
        missing = []
        for s in slices:
            if s.key not in index.entries:
                missing.append(s.key)
            elif s.data.numel():
                index.fill(s)
        if missing and not partial:
            raise CheckpointError(f"{path} has no {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} ({len(missing)} in all)")
        if missing and self._rank == 0:
            log.warning("not in %s, left as they are: %s", path, ", ".join(missing))
        same = index.ranks == self._world
        return index.extra, index.rank_extra(self._rank) if same else None


def _has_score(path: Path) -> bool:
    return json.loads((path / "checkpoint.json").read_text())["score"] is not None


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Whole weights and buffers of a checkpoint by name, without ranks: `model.` and `buffer.` entries."""
    index = read_index(path)
    out = {}
    for key, entries in index.entries.items():
        kind, name = key.split(".", 1)
        if kind in ("model", "buffer"):
            shape, dtype = tuple(entries[0]["shape"]), getattr(torch, entries[0]["dtype"])
            whole = torch.zeros(shape, dtype=dtype)
            index.fill(StateSlice(key, shape, dtype, 0, whole.numel(), whole.view(-1)))
            out[name] = whole
    return out
