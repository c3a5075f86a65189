"""A view of our checkpoints for torch.distributed.checkpoint: its `load` fills plain tensors and DTensors from them.

dcp.load({"model.embed.weight": tensor}, storage_reader=PartitaReader("outputs/run/checkpoints/step-00000100"))
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from partita.errors import CheckpointError
from partita.state.boxes import Box, boxes
from partita.train.index import INDEX, Entry, Index, find_checkpoint, read_index, read_rank, shard_name
from partita.train.shards import Piece, read_pieces


class PartitaReader(StorageReader):
    """Reads a checkpoint through torch.distributed.checkpoint. Every stored range of a tensor appears as its boxes.

    Only tensors are offered (keys as in the index); nothing is unpickled. Floating dtypes are converted to those of the targets.
    """

    def __init__(self, path: Path | str) -> None:
        """path: a checkpoint, or a run's folder for its latest. Raises CheckpointError."""
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start anew, with another checkpoint where one is given."""
        if checkpoint_id is not None:
            self.index: Index = read_index(find_checkpoint(Path(checkpoint_id)))
            self._boxes = _all_boxes(self.index)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes, dtypes and boxes of all tensors."""
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        for (key, offset), (box, _, _) in self._boxes.items():
            chunks[key].append(ChunkStorageMetadata(torch.Size(offset), torch.Size(box.size)))
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: TensorStorageMetadata(TensorProperties(dtype=e.dtype), torch.Size(e.shape), chunks[key])
            for key, e in self.index.tensors.items()
        }
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the index is there."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the items want, shard by shard. Raises CheckpointError for damage, and for what is no tensor."""
        work: dict[int, list[Piece]] = defaultdict(list)
        finish: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn}: only tensors can be read through torch.distributed.checkpoint")
            rank, piece, block = self._piece(item)
            work[rank].append(piece)
            finish.append((item, block))
        for rank in sorted(work):
            sums = read_rank(self.index, rank)["sums"]
            read_pieces(self.index.path / shard_name(rank), self.index.sizes[rank], sums, work[rank])
        for item, block in finish:
            target = planner.resolve_tensor(item)
            target.detach().copy_(block)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, item: ReadItem) -> tuple[int, Piece, torch.Tensor]:
        """Where the rows that an item wants lie, and the block (of the item's lengths) that they will be in."""
        key, offset = item.storage_index.fqn, item.storage_index.offset
        box, rank, byte = self._boxes[key, tuple(offset or ())]
        entry = self.index.tensors[key]
        rows = (item.storage_offsets[0], item.lengths[0]) if box.size else (0, 1)
        row = box.numel // box.size[0] if box.size else 1
        flat = torch.empty(rows[1] * row, dtype=entry.dtype)
        block = flat.view(rows[1], *box.size[1:]) if box.size else flat.view(())
        for dim in range(1, len(box.size)):
            block = block.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        lo = byte + rows[0] * row * entry.dtype.itemsize
        return rank, Piece(lo, lo + flat.numel() * entry.dtype.itemsize, entry.dtype, flat), block

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Is this a folder with one of our checkpoints?"""
        return (Path(checkpoint_id) / INDEX).is_file()


def _all_boxes(index: Index) -> dict[tuple[str, tuple[int, ...]], tuple[Box, int, int]]:
    """(key, offset) -> box, rank of the shard, byte in it."""
    return {(key, b.offset): (b, rank, byte) for key, e in index.tensors.items() for b, rank, byte in _entry_boxes(e)}


def _entry_boxes(entry: Entry) -> list[tuple[Box, int, int]]:
    size = entry.dtype.itemsize
    return [(b, p.rank, p.offset + (b.start - p.lo) * size) for p in entry.parts for b in boxes(entry.shape, p.lo, p.hi)]
