"""What a checkpoint holds and where: its documents, their merging at the end of a save, and finding checkpoints in a folder."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from partita.errors import CheckpointError, nearest
from partita.train.shards import BLOCK
from partita.train.storage import DTYPES, decode, dtype_name, read_sealed

FORMAT, VERSION = "partita-checkpoint", 1
INDEX, SUMMARY, LATEST, BEST = "index.json", "summary.json", "latest", "best.json"
_NAME = re.compile(r"\Astep-(\d{8,})\Z")


def step_name(step: int) -> str:
    """Name of the folder of a checkpoint after update `step`."""
    return f"step-{step:08d}"


def shard_name(rank: int) -> str:
    """Name of the file with the tensors' bytes of one rank."""
    return f"rank-{rank:05d}.bin"


def rank_name(rank: int) -> str:
    """Name of the document with the checksums and the own values of one rank."""
    return f"rank-{rank:05d}.json"


class Part(NamedTuple):
    """Elements [lo, hi) of a tensor, `offset` bytes into the shard of `rank`."""

    lo: int
    hi: int
    rank: int
    offset: int


@dataclass(frozen=True)
class Entry:
    """A stored tensor; the parts cover each element once, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def _starts(self) -> list[int]:
        return [p.lo for p in self.parts]

    def overlaps(self, lo: int, hi: int) -> list[Part]:
        """The stored parts that hold elements [lo, hi), cut to that range."""
        out = []
        for p in self.parts[max(0, bisect_right(self._starts, lo) - 1) :]:
            if p.lo >= hi:
                break
            a, b = max(lo, p.lo), min(hi, p.hi)
            if a < b:
                out.append(Part(a, b, p.rank, p.offset + (a - p.lo) * self.dtype.itemsize))
        return out


@dataclass(frozen=True)
class Index:
    """All that is known of a checkpoint without its tensors. sizes: bytes of the shard of each rank."""

    path: Path
    step: int
    attempt: str
    world: int
    sizes: tuple[int, ...]
    tensors: dict[str, Entry]
    plan: dict[str, Any]
    versions: dict[str, str]
    extra: Any


@dataclass(frozen=True)
class CheckpointInfo:
    """One line of a list of checkpoints. serial: order of saving in the folder. bytes: of the tensors."""

    path: Path
    step: int
    serial: int
    score: float | None
    saved: str
    world: int
    bytes: int
    attempt: str


# ------------------------------------------------------------------ merging, at the end of a save


def merge(reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The tensors of all ranks' reports (in rank order), as stored in the index: key -> shape, dtype, parts.

    Raises CheckpointError with the names where ranks differ about a tensor, or an element is saved by no rank or by two.
    """
    tensors: dict[str, Any] = {}
    wrong: list[str] = []
    for rank, report in enumerate(reports):
        for key, shape, dtype, lo, hi, offset in report["parts"]:
            entry = tensors.setdefault(key, {"shape": shape, "dtype": dtype, "parts": []})
            if (entry["shape"], entry["dtype"]) != (shape, dtype):
                wrong.append(f"{key}: {dtype} {shape} on rank {rank}, {entry['dtype']} {entry['shape']} on another")
            entry["parts"].append([lo, hi, rank, offset])
    for key, entry in tensors.items():
        entry["parts"].sort()
        gap = _gap(entry["parts"], math.prod(entry["shape"]))
        if gap:
            wrong.append(f"{key}: {gap}")
    if wrong:
        raise CheckpointError("the ranks' parts do not make whole tensors: " + some(wrong))
    return tensors


def _gap(parts: list[list[int]], numel: int) -> str:
    at = 0
    for lo, hi, rank, _ in parts:
        if lo != at and lo < hi:
            return (
                f"elements {at} to {lo} are saved by no rank" if lo > at else f"elements from {lo} are saved twice (rank {rank})"
            )
        at = max(at, hi)
    return f"elements {at} to {numel} are saved by no rank" if at != numel else ""


def some(items: list[str], count: int = 8) -> str:
    """The first items and how many more."""
    more = f", and {len(items) - count} more" if len(items) > count else ""
    return ", ".join(items[:count]) + more


# ------------------------------------------------------------------ reading


def read_index(path: Path) -> Index:
    """The index of the checkpoint in the folder `path`. Raises CheckpointError where it is absent, damaged or unknown."""
    content = read_sealed(path / INDEX)
    check_format(path, content)
    with readable(path / INDEX):
        sizes = tuple(natural(n) for n in content["sizes"])
        step, world, attempt = natural(content["step"]), natural(content["world"]), content["attempt"]
        tensors = {key: _entry(path, key, e, sizes) for key, e in content["tensors"].items()}
        if world != len(sizes) or not isinstance(attempt, str):
            raise ValueError(f"{world} ranks, and the sizes of {len(sizes)} shards")
        extra = decode(content["extra"])
        return Index(path, step, attempt, world, sizes, tensors, content["plan"], content["versions"], extra)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A document with a right checksum and wrong content is an error like any other damage."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path} is not as the format says: {type(error).__name__}: {error}; use another one") from error


def natural(value: Any) -> int:
    """A count from a document. Raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _entry(path: Path, key: str, entry: dict[str, Any], sizes: tuple[int, ...]) -> Entry:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: {key} has the dtype {entry['dtype']}, which torch {torch.__version__} does not know")
    dtype, shape = DTYPES[entry["dtype"]], tuple(natural(n) for n in entry["shape"])
    rows = [[natural(n) for n in row] for row in entry["parts"]]
    for lo, hi, rank, offset in rows:
        if lo > hi or rank >= len(sizes) or offset % dtype.itemsize or offset + (hi - lo) * dtype.itemsize > sizes[rank]:
            raise ValueError(f"{key}: the part {[lo, hi, rank, offset]} lies outside of the shards")
    gap = _gap(rows, math.prod(shape))
    if gap:
        raise ValueError(f"{key}: {gap}")
    return Entry(shape, dtype, tuple(Part(*row) for row in rows))


def check_format(path: Path, content: dict[str, Any]) -> None:
    """Refuse what another program, or a later version of this one, wrote."""
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a {FORMAT} but {content.get('format')!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path} has format version {content.get('version')}; this partita reads version {VERSION}")


def read_rank(index: Index, rank: int) -> dict[str, Any]:
    """The document of one rank: checksums and own values. It must come from the same save as the index."""
    path = index.path / rank_name(rank)
    content = read_sealed(path)
    with readable(path):
        if content["attempt"] != index.attempt:
            raise CheckpointError(f"{path} comes from another checkpoint than {INDEX} beside it")
        if len(content["sums"]) != 8 * -(-index.sizes[rank] // BLOCK):
            raise ValueError(f"checksums of {len(content['sums']) // 8} blocks for {index.sizes[rank]} bytes")
        if "rank_extra" not in content:
            raise ValueError("no rank_extra")
    return content


# ------------------------------------------------------------------ finding


def list_checkpoints(folder: Path | str) -> list[CheckpointInfo]:
    """The complete checkpoints in `folder` (a run's `checkpoints`, or the run's own), oldest save first."""
    folder = _checkpoints(Path(folder))
    found = [_info(p) for p in folder.iterdir() if _NAME.match(p.name)] if folder.is_dir() else []
    return sorted((i for i in found if i is not None), key=lambda i: (i.serial, i.step))


def _checkpoints(folder: Path) -> Path:
    inner = folder / "checkpoints"
    return inner if inner.is_dir() else folder


def _info(path: Path) -> CheckpointInfo | None:
    """The summary of a checkpoint; None where there is no complete one (a folder that somebody made, or emptied, by hand)."""
    if not (path / SUMMARY).is_file() or not (path / INDEX).is_file():
        return None
    try:
        content = read_sealed(path / SUMMARY)
        check_format(path, content)
        with readable(path):
            counts = {k: natural(content[k]) for k in ("step", "serial", "world", "bytes")}
            score = content["score"]
            return CheckpointInfo(
                path,
                score=None if score is None else float(score),
                saved=str(content["saved"]),
                attempt=content["attempt"],
                **counts,
            )
    except CheckpointError:
        return None


def latest_in(folder: Path) -> Path | None:
    """The checkpoint that `latest` names; where that is gone, the one saved last."""
    pointer = folder / LATEST
    if pointer.is_file():
        name = pointer.read_text(errors="replace").strip()
        if _NAME.match(name) and _info(folder / name) is not None:
            return folder / name
    found = list_checkpoints(folder)
    return found[-1].path if found else None


def find_checkpoint(path: Path | str) -> Path:
    """The checkpoint that `path` means: its own folder, or the latest one in a run's folder. Raises CheckpointError."""
    path = Path(path).absolute()
    if (path / INDEX).is_file() and not path.name.endswith(".tmp"):
        return path
    inside = None if path.name.endswith(".tmp") or not path.is_dir() else latest_in(_checkpoints(path))
    if inside is not None:
        return inside
    raise CheckpointError(_not_found(path))


def _not_found(path: Path) -> str:
    near = nearest(path.name, [i.path.name for i in list_checkpoints(path.parent)])
    hint = f"; beside it are {', '.join(near)}" if near else ""
    if path.name.endswith(".tmp"):
        return f"{path} is an unfinished save{hint}"
    return f"{path} {'holds no complete checkpoint' if path.exists() else 'does not exist'}{hint}"


def inspect(path: Path | str) -> dict[str, Any]:
    """What a checkpoint holds, as plain values: step, world, plan, versions, extra, bytes; of each tensor dtype, shape, parts."""
    index = read_index(find_checkpoint(path))
    tensors = {k: {"dtype": dtype_name(e.dtype), "shape": e.shape, "parts": len(e.parts)} for k, e in index.tensors.items()}
    head = {k: getattr(index, k) for k in ("path", "step", "world", "plan", "versions", "extra")}
    return {**head, "bytes": sum(index.sizes), "tensors": tensors}
