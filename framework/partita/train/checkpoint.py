"""Checkpoints of a run: saved in the background from a copy taken at a step boundary, complete or absent, loadable by any layout.

The format is described in docs/checkpoints.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist

from partita.errors import CheckpointError
from partita.runtime.mesh import Mesh
from partita.state.slices import StateSlice
from partita.train.index import CheckpointInfo, find_checkpoint, inspect, latest_in, list_checkpoints, read_index, step_name
from partita.train.loading import LoadReport, Skip, load_slices, read_rank_extra, read_weights, verify
from partita.train.saving import JOIN, Save, recover
from partita.train.shards import host_buffer, step_back
from partita.train.snapshot import Snapshot, take_snapshot

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "LoadReport",
    "find_checkpoint",
    "inspect",
    "latest_in",
    "list_checkpoints",
    "load_slices",
    "read_index",
    "read_weights",
    "verify",
]
log = logging.getLogger("partita")


class Checkpointer:
    """Saves and loads the checkpoints in one folder, which all ranks see. Every rank has one and makes the same calls of `save`.

    keep: checkpoints saved last that stay. keep_best: as well, those with the lowest score. asynchronous: write in a thread while
    training goes on; needs host memory for one more copy of this rank's part. patience: seconds without a sign of life of another
    rank after which a save fails. report: of the last load.
    Making one is collective (one broadcast) where a process group exists. Raises CheckpointError where the folder can't be used.
    """

    def __init__(
        self,
        dir: Path | str,
        mesh: Mesh,
        *,
        keep: int = 2,
        keep_best: int = 0,
        asynchronous: bool = True,
        patience: float = 300.0,
        summary: Mapping[str, Any] | None = None,
        life: str | None = None,
    ) -> None:
        """summary: JSON values about the plan, for the index. life: a name of this start, equal on all ranks; default: agreed."""
        if keep < 1 or keep_best < 0:
            raise CheckpointError(
                f"train.keep={keep}, train.keep_best={keep_best}: keep at least the newest checkpoint (1), and 0 or more best"
            )
        self.dir, self.mesh = Path(dir).absolute(), mesh
        self.keep, self.keep_best, self.asynchronous, self.patience = keep, keep_best, asynchronous, patience
        self.plan = json.loads(json.dumps({"layout": dataclasses.asdict(mesh.layout), **(summary or {})}))
        self.report: LoadReport | None = None
        if mesh.rank == 0:
            _prepare(self.dir)
        self._life = life or agree(mesh)
        self._count = 0
        self._stop = Event()
        self._thread: Thread | None = None
        self._error: CheckpointError | None = None
        self._host = torch.empty(0, dtype=torch.uint8)

    # ------------------------------------------------------------------ where

    def path(self, step: int) -> Path:
        """Where the checkpoint after update `step` is, or would be."""
        return self.dir / step_name(step)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, if there is one."""
        return latest_in(self.dir)

    # ------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        slices: Sequence[StateSlice],
        extra: Mapping[str, Any],
        rank_extra: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Start to save the state after update `step`; what is passed may change as soon as this returns.

        slices: this rank's part of all states; the parts of all ranks cover each element once. extra (rank 0's is stored) and
        rank_extra (each rank's is): JSON values, tuples and bytes. score: lower is better. A save that still runs is waited for.
        Raises CheckpointError for an earlier save that failed and was not reported yet (this one has started nevertheless, on
        every rank alike), and, where not asynchronous, for this one.
        """
        self._join()
        self._count += 1
        mesh = self.mesh
        attempt = f"{self._life}-{self._count}"
        fixed = (mesh.rank, mesh.world, self.keep, self.keep_best, self.patience, self._stop, _caller(), min(JOIN, self.patience))
        job = Save(self.dir, step, attempt, *fixed)
        taken: Snapshot | Exception
        try:
            taken = self._take(slices, extra, rank_extra, score)
        except Exception as error:  # the other ranks are told before it is raised here
            taken = error
        self._thread = Thread(target=self._run, args=(job, taken), name="partita-checkpoint", daemon=True)
        pending, self._error = self._error, None
        self._thread.start()
        if not self.asynchronous:
            self.wait()
        if pending is not None:
            raise pending

    def _run(self, job: Save, taken: Snapshot | Exception) -> None:
        """The background thread: its error is kept for poll and wait."""

        def take() -> Snapshot:
            if isinstance(taken, Exception):
                raise taken
            return taken

        step_back()
        try:
            job.run(take)
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(
                f"the checkpoint of step {job.step} failed on rank {job.rank}: {type(error).__name__}: {error}"
            )
            self._error.__cause__ = error

    def _take(
        self, slices: Sequence[StateSlice], extra: Mapping[str, Any], rank_extra: Mapping[str, Any], score: float | None
    ) -> Snapshot:
        """Copy everything into host memory that is used again by the next save."""
        mesh = self.mesh
        return take_snapshot(
            slices, extra, rank_extra, rank=mesh.rank, device=mesh.device, plan=self.plan, buffer=self._buffer, score=score
        )

    def _buffer(self, size: int) -> torch.Tensor:
        if self._host.numel() < size:
            self._host = host_buffer(size, pinned=self.mesh.device.type != "cpu")
        return self._host

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def poll(self) -> None:
        """Raise the CheckpointError of a save that has failed in the background, once. Never waits."""
        if self._thread is None or not self._thread.is_alive():
            self._join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def wait(self) -> None:
        """Return when the checkpoint that was started last is complete. Raises CheckpointError if it failed."""
        self._join()
        self.poll()

    def close(self, grace: float = 5.0) -> None:
        """End; a save still running gets `grace` seconds more (other ranks may be gone). Never raises: errors are logged."""
        if self._thread is not None:
            self._thread.join(grace)
            self._stop.set()
            self._thread.join(1.0)
            if not self._thread.is_alive():
                self._thread = None
        if self._error is not None:
            log.error("%s", self._error)
            self._error = None

    # ------------------------------------------------------------------ loading

    def load(
        self, path: Path | str, slices: Sequence[StateSlice], partial: bool = False, skip: Skip | None = None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fill `slices` from a checkpoint of any layout; returns (extra, this rank's rank_extra or None where the world differs).

        path: a checkpoint, or a run's folder for its latest. partial: load what is there. skip: of an index and a key, whether to
        do without it. `report` names what was left untouched.
        Not collective. Raises CheckpointError as `load_slices` does.
        """
        index, self.report = load_slices(path, slices, partial, skip)
        return index.extra, read_rank_extra(index, self.mesh.rank, self.mesh.world)


def _caller() -> str:
    """File and line that called into this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _prepare(folder: Path) -> None:
    """Make the folder, and clear what a killed process left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recover(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} can't be used for checkpoints: {error}; set run.dir to a folder that can be written"
        ) from error


def agree(mesh: Mesh) -> str:
    """A name of this start that all ranks share and no earlier start had; after it, rank 0 has cleared the folder."""
    name = torch.tensor(list(secrets.token_bytes(4)), dtype=torch.uint8, device=mesh.device)
    if mesh.world > 1 and dist.is_initialized():
        dist.broadcast(name, src=0)
    elif mesh.world > 1:
        raise CheckpointError(f"{mesh.world} ranks need a process group to agree on the name of a save, or the argument `life`")
    return bytes(name.tolist()).hex()
