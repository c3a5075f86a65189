"""Snapshots in the host's memory: a run that has lost a rank goes on from the newest one, without the disk.

Each rank copies its part of the states into memory of its node that outlives the rank: files in memory which the process that started
the ranks holds (they go with it), or files in a folder like /dev/shm where torchrun or Slurm started them. With several nodes, a rank of
the next node gets a copy of it, so that a node may be lost (Wang et al. 2023, "Gemini", section 4).

    folder/step-N.<attempt>/rank-R.bin      link to the memory that holds the bytes
                            rank-R.json     checksums and own values, as in a checkpoint
                            rank-R.part     what the bytes are; written last: with it, the part is complete
    folder/rank-R.<0 or 1>.memory           that memory, where nobody else holds it

A snapshot that is restored gets an index, and is a checkpoint then like any other. The one before the newest stays until all ranks have
completed the newest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from partita import __version__
from partita.errors import CheckpointError
from partita.runtime.mesh import Mesh
from partita.state.slices import StateSlice
from partita.train.checkpoint import agree
from partita.train.index import (
    FORMAT,
    INDEX,
    VERSION,
    Index,
    merge,
    natural,
    rank_name,
    read_index,
    readable,
    shard_name,
    step_name,
)
from partita.train.mapped import map_file
from partita.train.neighbour import Neighbour, Parcel, gathered
from partita.train.shards import checksums, step_back
from partita.train.snapshot import Snapshot, take_snapshot
from partita.train.storage import read_sealed, write_sealed

log = logging.getLogger("partita")
MOVE = 64 << 20  # bytes of a shard that travel at once when it is restored from another node


class MemorySnapshots:
    """Every rank has one and makes the same calls; making one, `save` and `restore` are collective.

    folder: of this node; the ranks that name the same one on the same host are a node. slots: two files for each rank that hold the
    bytes, in rank order; default: files in the folder.
    """

    def __init__(self, folder: Path, mesh: Mesh, slots: Sequence[str] = (), plan: Mapping[str, Any] | None = None) -> None:
        self.folder, self.mesh, self._slots, self._plan = folder.absolute(), mesh, list(slots), dict(plan or {})
        self.folder.mkdir(parents=True, exist_ok=True)
        self._nodes: list[str] = gathered(f"{socket.gethostname()}:{self.folder}", mesh.world)
        self._life, self._count = agree(mesh), 0
        self._confirmed = ""  # name of the newest snapshot that is complete on all ranks
        self._newest = ""
        self._good = False  # this rank's part of the newest one is complete
        self._thread: Thread | None = None
        self._maps: dict[str, torch.Tensor] = {}
        self._neighbour = Neighbour(mesh.rank, self._nodes, self._receive) if len(set(self._nodes)) > 1 else None

    # ------------------------------------------------------------------ saving

    def save(self, step: int, slices: Sequence[StateSlice], extra: Mapping[str, Any], rank_extra: Mapping[str, Any]) -> None:
        """Copy the state after update `step`; what is passed may change as soon as this returns. The arguments are a checkpoint's.

        Checksums and the neighbour's copy are made in the background. What fails costs this snapshot only, and a warning.
        """
        self._settle()
        self._count += 1
        self._newest, self._good = f"{step_name(step)}.{self._life}-{self._count}", False
        inside = self.folder / self._newest
        try:
            inside.mkdir(exist_ok=True)
            taken = take_snapshot(
                slices, extra, rank_extra, rank=self.mesh.rank, device=self.mesh.device, plan=self._plan,
                buffer=lambda size: self._memory(inside, self.mesh.rank, size, self._confirmed),
            )  # fmt: skip
        except (OSError, CheckpointError) as error:
            self._warn(error)
            return
        arguments = (inside, step, taken, self._confirmed)
        self._thread = Thread(target=self._finish, args=arguments, name="partita-snapshot", daemon=True)
        self._thread.start()

    def _finish(self, inside: Path, step: int, taken: Snapshot, keep: str) -> None:
        """The background thread."""
        step_back()
        attempt, rank = inside.name.rpartition(".")[2], self.mesh.rank
        own = {"attempt": attempt, "rank": rank, "sums": checksums(taken.data), "rank_extra": taken.rank_extra}
        head = {"attempt": attempt, "step": step, "world": self.mesh.world, "count": self._count}
        part = {**head, "size": taken.data.numel(), "parts": taken.parts, "extra": taken.extra, "plan": taken.plan}
        try:
            write_sealed(inside / rank_name(rank), own, durable=False)
            _complete(inside, rank, part)
            if self._neighbour is not None:
                texts = [(inside / name).read_text() for name in (rank_name(rank), _part_name(rank))]
                parcel = Parcel(inside.name, keep, rank, taken.data.numel(), *texts)
                self._neighbour.send(parcel, memoryview(taken.data.numpy()))  # type: ignore[arg-type]
            self._good = True
        except (OSError, CheckpointError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        log.warning("no snapshot in memory of %s from rank %d: %s", self._newest.partition(".")[0], self.mesh.rank, error)

    def _settle(self) -> None:
        """Wait for this rank's part of the newest one; where all ranks have theirs, what is older goes. Collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        everywhere = torch.tensor([int(self._good)], dtype=torch.int32, device=self.mesh.device)
        if self.mesh.world > 1:
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if everywhere.item():
            self._confirmed = self._newest
        for path in self.folder.glob("step-*"):
            if path.name != self._confirmed and not self._ahead(path.name):
                self._drop(path)

    def _ahead(self, name: str) -> bool:
        """Is this one that a faster rank sends a copy of already?"""
        life, _, count = name.rpartition(".")[2].partition("-")
        return life == self._life and int(count) > self._count

    def _drop(self, path: Path) -> None:
        """Remove this rank's files of a snapshot, and those of the ranks that it keeps copies for."""
        for rank in [self.mesh.rank, *(self._neighbour.sources if self._neighbour else ())]:
            for name in (_part_name(rank), rank_name(rank), shard_name(rank)):
                (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are in it
            path.rmdir()

    # ------------------------------------------------------------------ memory

    def _memory(self, inside: Path, rank: int, size: int, keep: str) -> torch.Tensor:
        """`size` bytes for the shard of `rank`, in the slot that the snapshot `keep` does not use; linked under its name."""
        own = self._slots[2 * rank : 2 * rank + 2] or [str(self.folder / f"rank-{rank:05d}.{i}.memory") for i in range(2)]
        used = _link(self.folder / keep / shard_name(rank)) if keep else ""
        slot = next(s for s in own if s != used)
        if slot not in self._maps or self._maps[slot].numel() != size:
            self._maps.pop(slot, None)
            self._maps[slot] = map_file(slot, size)
        link = inside / shard_name(rank)
        link.unlink(missing_ok=True)
        link.symlink_to(slot)
        return self._maps[slot]

    def _receive(self, parcel: Parcel) -> tuple[memoryview, Callable[[], None]]:
        """Where the bytes of another rank's shard go, and what to do when they are there."""
        inside = self.folder / parcel.snapshot
        inside.mkdir(exist_ok=True)
        memory = self._memory(inside, parcel.rank, parcel.size, parcel.keep)

        def done() -> None:
            (inside / rank_name(parcel.rank)).write_text(parcel.document)
            _replace(inside / _part_name(parcel.rank), parcel.part)

        return memoryview(memory.numpy()), done  # type: ignore[arg-type]

    # ------------------------------------------------------------------ restoring

    def restore(self, needed: Callable[[Index], set[int]], at_least: int) -> Path | None:
        """The newest snapshot that is complete on the nodes together and not older than step `at_least`, as a checkpoint; or None.

        needed: of an index, the shards that this rank reads; those that are on another node are fetched. Collective.
        """
        name, held = self._choose(at_least)
        for path in self.folder.glob("step-*"):
            if path.name != name and self._leads():
                shutil.rmtree(path, ignore_errors=True)
        if not name:
            return None
        inside = self.folder / name
        self._share_documents(inside, held)
        self._barrier()
        self._confirmed = name  # its slots are in use
        index = read_index(inside)
        self._fetch(inside, index, held, gathered(sorted(needed(index)), self.mesh.world))
        self._barrier()
        return inside

    def _leads(self) -> bool:
        return self._nodes.index(self._nodes[self.mesh.rank]) == self.mesh.rank

    def _choose(self, at_least: int) -> tuple[str, list[list[int]]]:
        """(name, for each rank the shards that its node holds: those of a leader, empty for others)."""
        found: dict[str, dict[int, list[int]]] = {}
        for path in self.folder.glob("step-*") if self._leads() else ():
            for part in path.glob("*.part"):
                with contextlib.suppress(CheckpointError), readable(part):
                    content = read_sealed(part)
                    about = [natural(content[key]) for key in ("step", "count", "world")]
                    rank = int(part.name[5:10])
                    read_sealed(path / rank_name(rank))
                    if (path / shard_name(rank)).exists():
                        found.setdefault(path.name, {})[rank] = about
        everyone = gathered(found, self.mesh.world)
        best, chosen = (at_least - 1, -1), ""
        for name in sorted({name for node in everyone for name in node}):
            parts = {rank: about for node in everyone for rank, about in node.get(name, {}).items()}
            step, count, world = next(iter(parts.values()))
            whole = len(parts) == world and sorted(parts) == list(range(world))  # a damaged world may be any number
            if whole and (step, count) > best and step >= at_least:
                best, chosen = (step, count), name
        return chosen, [sorted(node.get(chosen, {})) for node in everyone]

    def _share_documents(self, inside: Path, held: list[list[int]]) -> None:
        """The documents of all shards, and the index, on every node."""
        mine = {r: [(inside / n).read_text() for n in (rank_name(r), _part_name(r))] for r in held[self.mesh.rank]}
        texts: dict[int, list[str]] = {}
        for node in gathered(mine, self.mesh.world):
            texts |= node
        if not self._leads():
            return
        inside.mkdir(exist_ok=True)
        for rank, (document, _) in texts.items():
            (inside / rank_name(rank)).write_text(document)
        with readable(inside):
            self._write_index(inside, [json.loads(texts[rank][1]) for rank in sorted(texts)])

    def _write_index(self, inside: Path, parts: list[dict[str, Any]]) -> None:
        first = parts[0]
        head = {"format": FORMAT, "version": VERSION, "step": first["step"], "attempt": first["attempt"], "world": len(parts)}
        versions = {"partita": __version__, "torch": torch.__version__}
        body = {"plan": first["plan"], "versions": versions, "extra": first["extra"], "sizes": [p["size"] for p in parts]}
        write_sealed(inside / INDEX, {**head, **body, "tensors": merge(parts)}, durable=False)

    def _fetch(self, inside: Path, index: Index, held: list[list[int]], needed: list[list[int]]) -> None:
        """Send shards from nodes that hold them to nodes whose ranks need them and lack them."""
        leader = [self._nodes.index(node) for node in self._nodes]
        wanted = sorted(
            {(shard, leader[r]) for r, shards in enumerate(needed) for shard in shards if shard not in held[leader[r]]}
        )
        for shard, target in wanted:
            source = next(r for r, shards in enumerate(held) if shard in shards)
            if self.mesh.rank in (source, target):
                path = inside / shard_name(shard)
                size = index.sizes[shard]
                whole = self._memory(inside, shard, size, "") if self.mesh.rank == target else map_file(str(path), size)
                for start in range(0, whole.numel(), MOVE):
                    self._move(whole[start : start + MOVE], source, target)

    def _move(self, piece: torch.Tensor, source: int, target: int) -> None:
        there = piece.to(self.mesh.device)
        if self.mesh.rank == source:
            dist.send(there, target)
        else:
            dist.recv(there, source)
            piece.copy_(there)

    def _barrier(self) -> None:
        if self.mesh.world > 1:
            dist.barrier()

    # ------------------------------------------------------------------ the end

    def forget(self) -> None:
        """No snapshot of the past is restored any more (the run goes another way from here). Collective."""
        self._good = False
        self._settle()
        self._confirmed = ""
        if self._leads():
            for path in self.folder.glob("step-*"):
                shutil.rmtree(path, ignore_errors=True)
        self._barrier()

    def close(self) -> None:
        """End the threads; what is in memory stays."""
        if self._neighbour is not None:
            self._neighbour.close()
        if self._thread is not None:
            self._thread.join(1.0)

    def remove(self) -> None:
        """The run is over: give the memory back."""
        if self._leads() and not self._slots:
            shutil.rmtree(self.folder, ignore_errors=True)


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.part"


def _complete(inside: Path, rank: int, part: dict[str, Any]) -> None:
    new = inside / f"rank-{rank:05d}.new"
    write_sealed(new, part, durable=False)
    os.replace(new, inside / _part_name(rank))


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
