"""Reading a checkpoint: any rank of any layout takes just the bytes it needs, without talking to another."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError, nearest
from partita.state.slices import StateSlice, Term
from partita.train.index import Entry, Index, find_checkpoint, rank_name, read_index, read_rank, readable, shard_name, some
from partita.train.shards import Piece, read_pieces
from partita.train.storage import decode, dtype_name

log = logging.getLogger("partita")
WEIGHTS = ("model.", "buffer.")


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank, by key. missing: not in the checkpoint. mismatched: of another shape or kind of number.

    converted: stored in another floating dtype. skipped: left as they were since the caller said so. bytes_read: from shards, whole
    blocks of 256 KiB.
    """

    path: Path
    step: int
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[str, ...]
    converted: tuple[str, ...]
    bytes_read: int
    skipped: tuple[str, ...] = ()


Skip = Callable[[Index, str], bool]  # of a checkpoint and a key: whether the caller does without it


def load_slices(
    path: Path | str, slices: Sequence[StateSlice], partial: bool = False, skip: Skip | None = None
) -> tuple[Index, LoadReport]:
    """Fill `slices` from a checkpoint that any layout wrote. Needs no process group; memory needed beside the slices is a few MB.

    Stored and wanted dtype may differ if both are floating: values are rounded to the wanted one. `partial`: load what is there,
    leave and report the rest, as is always done for optional slices. `skip`: leave these without looking for them. Raises CheckpointError with the names where, without `partial`, something is missing or of another
    shape (nothing has been changed then), and where a file is damaged.
    """
    index = read_index(find_checkpoint(path))
    skipped = {s.key for s in slices if skip is not None and skip(index, s.key)}
    slices = [s.found_in(index.tensors) for s in slices if s.key not in skipped]
    unusable = {s.key: why for s in slices if (why := _unusable(index.tensors.get(s.key), s))}
    needed = {s.key: unusable[s.key] for s in slices if s.key in unusable and not s.optional}
    if needed and not partial:
        raise _refusal(index, needed)
    usable = [s for s in slices if s.key not in unusable]
    read = fill(index, usable)
    for s in slices:
        if s.key in unusable and s.instead is not None:
            terms = s.instead(index.tensors)
            read += _add_up(index, s, terms or ())
            if terms is None or terms:
                del unusable[s.key]
    report = replace(_report(index, usable, unusable, read), skipped=tuple(sorted(skipped)))
    if unusable:
        log.warning("%s: left untouched: %s", index.path, some([f"{k} ({why})" for k, why in unusable.items()]))
    return index, report


def _unusable(entry: Entry | None, wanted: StateSlice) -> str:
    """Why a slice can't be filled; empty if it can."""
    if entry is None:
        return "missing"
    if entry.shape != tuple(wanted.shape):
        return f"stored as {list(entry.shape)}, wanted as {list(wanted.shape)}"
    stored, dtype = entry.dtype, wanted.data.dtype
    if stored != dtype and not (stored.is_floating_point and dtype.is_floating_point):
        return f"stored as {dtype_name(stored)}, wanted as {dtype_name(dtype)}"
    return ""


def _refusal(index: Index, unusable: dict[str, str]) -> CheckpointError:
    missing = [k for k, why in unusable.items() if why == "missing"]
    lines = [f"{index.path} does not fit this model:"]
    lines += [f"  {k}: {why}" for k, why in list(unusable.items())[:20] if why != "missing"]
    if missing:
        near = nearest(missing[0], index.tensors)
        hint = f"; nearest to {missing[0]}: {', '.join(near)}" if near else ""
        lines.append(f"  missing: {some(missing, 20)}{hint}")
    lines.append("  Use the model config of the run that wrote it, or load with partial=True.")
    return CheckpointError("\n".join(lines))


def _report(index: Index, usable: list[StateSlice], unusable: dict[str, str], read: int) -> LoadReport:
    loaded = dict.fromkeys(s.key for s in usable)
    converted = dict.fromkeys(s.key for s in usable if index.tensors[s.key].dtype != s.data.dtype)
    missing = tuple(k for k, why in unusable.items() if why == "missing")
    mismatched = tuple(k for k, why in unusable.items() if why != "missing")
    return LoadReport(index.path, index.step, tuple(loaded), missing, mismatched, tuple(converted), read)


def fill(index: Index, slices: Sequence[StateSlice]) -> int:
    """Read what the slices want, shard by shard; returns the bytes read."""
    work: dict[int, list[Piece]] = defaultdict(list)
    for s in slices:
        entry = index.tensors[s.key]
        for part in entry.overlaps(s.lo, s.hi):
            size = (part.hi - part.lo) * entry.dtype.itemsize
            work[part.rank].append(Piece(part.offset, part.offset + size, entry.dtype, s.data[part.lo - s.lo : part.hi - s.lo]))
    read = 0
    with torch.no_grad():
        for rank in sorted(work):
            sums = read_rank(index, rank)["sums"]
            read += read_pieces(index.path / shard_name(rank), index.sizes[rank], sums, work[rank])
    return read


def _add_up(index: Index, wanted: StateSlice, terms: Sequence[Term]) -> int:
    """Set a slice to the sum of its terms; returns the bytes read."""
    read = 0
    wanted.data.zero_()
    for key, lo, hi, at in terms:
        entry = index.tensors[key]
        part = torch.empty(hi - lo, dtype=wanted.data.dtype)
        read += fill(index, [StateSlice(key, entry.shape, entry.dtype, lo, hi, part)])
        wanted.data[at : at + hi - lo].add_(part.to(wanted.data.device))
    return read


def read_rank_extra(index: Index, rank: int, world: int) -> Any:
    """What this rank passed to the save; None where another number of ranks saved."""
    if index.world != world:
        return None
    with readable(index.path / rank_name(rank)):
        return decode(read_rank(index, rank)["rank_extra"])


def read_weights(path: Path | str, dtype: torch.dtype | None = None, *, tied: bool = True) -> dict[str, torch.Tensor]:
    """All parameters and saved buffers of a checkpoint as whole tensors on the CPU, by their names in the model.

    dtype: for floating tensors; default: as stored (the master weights). tied: shared parameters under all of their names, as `load_state_dict` of a plain
    module wants them (the same tensor); else once, under the first one.
    """
    index = read_index(find_checkpoint(path))
    out: dict[str, torch.Tensor] = {}
    slices = []
    for key, e in index.tensors.items():
        prefix = next((p for p in WEIGHTS if key.startswith(p)), None)
        if prefix is None:
            continue
        kind = dtype if dtype is not None and e.dtype.is_floating_point else e.dtype
        tensor = out[key.removeprefix(prefix)] = torch.empty(e.shape, dtype=kind)
        slices.append(StateSlice(key, e.shape, kind, 0, e.numel, tensor.view(-1)))
    fill(index, slices)
    if tied and isinstance(index.extra, dict):
        out |= {alias: out[name] for alias, name in index.extra.get("aliases", {}).items() if name in out}
    return out


def verify(path: Path | str) -> int:
    """Read all of a checkpoint against its checksums; returns the bytes of its shards. Raises CheckpointError at damage."""
    index = read_index(find_checkpoint(path))
    for rank, size in enumerate(index.sizes):
        sums = read_rank(index, rank)["sums"]
        read_pieces(index.path / shard_name(rank), size, sums, [Piece(0, size, torch.uint8, None)] if size else [])
    return sum(index.sizes)
