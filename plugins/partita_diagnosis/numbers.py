"""Numbers that went wrong: not finite, a loss far off, replicas that differ, a computation that differs from its own repetition."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.errors import PartitaError, RollBack
from partita_diagnosis.report import Report

WINDOW, FEWEST = 64, 16  # losses that a new one is compared with
Found = dict[str, Any]


# ------------------------------------------------------------------ not finite


def trace_nonfinite(run: Any, report: Report, folder: Path) -> None:
    """Compute the batch of the failed update again and name the first module whose output is not finite, on each rank.

    All ranks are here: the norm that was not finite is the same on all of them. Rank 0 reports.
    """
    step = run.step + 1
    compare_replicas(run, step, report)  # a copy that differs is the nearer cause
    found = _bad_weights(run) or _rerun(run, step) or _bad_gradients(run) or {}
    (folder / f"nonfinite-{run.rank}.json").write_text(json.dumps(found))
    if run.rank:
        return
    everyone = _collect(folder, run.mesh.world)
    guilty = {rank: f for rank, f in everyone.items() if f}
    if not guilty:
        cause = (
            "the gradient norm was not finite, and computing the same batch again gives finite numbers on every rank: "
            "a passing fault of a device or of a transfer is likely"
        )
        report.add("nonfinite", step, cause)
        return
    first = min(guilty.values(), key=lambda f: f["order"])
    ranks = [rank for rank, f in guilty.items() if f["name"] == first["name"] and f["kind"] == first["kind"]]
    everywhere = len(ranks) == run.mesh.world and len(ranks) > 1
    who = "every rank" if everywhere else f"rank {', '.join(map(str, ranks))}"
    why = {
        "weights": "the weights were not finite before the step: look at the update before, or at the checkpoint",
        "module": "its inputs and weights are finite, and the same comes out when the batch is computed again: "
        + ("data or learning rate" if everywhere else "this rank's share of the batch, or its device"),
        "gradients": "the forward pass is finite: the numbers overflow in the backward pass; lower optimizer.lr or set train.grad_clip",
    }[first["kind"]]
    cause = f"{first['kind']} {first['name']} is the first that is not finite, on {who}; {why}"
    report.add("nonfinite", step, cause, about=first["name"], ranks=ranks, found=guilty)


def _collect(folder: Path, world: int) -> dict[int, Found]:
    out: dict[int, Found] = {}
    end = time.monotonic() + 5.0
    while len(out) < world and time.monotonic() < end:
        for rank in range(world):
            path = folder / f"nonfinite-{rank}.json"
            if rank not in out and path.exists():
                try:
                    out[rank] = json.loads(path.read_text())
                except ValueError:
                    continue  # it is being written
        time.sleep(0.05)
    return out


def _bad_weights(run: Any) -> Found | None:
    for i, piece in enumerate(s for s in run.engine.load_slices() if s.key.startswith("model.")):
        if not bool(torch.isfinite(piece.data).all()):
            return {"kind": "weights", "name": piece.key.removeprefix("model."), "order": i - 10**6}
    return None


def _bad_gradients(run: Any) -> Found | None:
    for i, bucket in enumerate(run.engine.buckets):
        if bucket.reduced is None or bool(torch.isfinite(bucket.reduced).all()):
            continue
        for s, lo, hi in bucket.layout.owned(bucket.index):
            start = s.offset - (bucket.index * bucket.layout.shard if bucket.reduced.numel() == bucket.layout.shard else 0)
            if not bool(torch.isfinite(bucket.reduced[start + lo : start + hi]).all()):
                return {"kind": "gradients", "name": s.name, "order": i + 10**6}
    return None


def _rerun(run: Any, step: int) -> Found | None:
    """The first module of a forward pass over the batch of `step` whose output is not finite although its inputs are."""
    found: list[Found] = []
    names = {module: name for name, module in run.model.named_modules() if name}

    def look(module: Any, inputs: Any, output: Any) -> None:
        if not found and isinstance(output, torch.Tensor) and not bool(torch.isfinite(output).all()):
            found.append({"kind": "module", "name": names[module], "order": len(seen)})
        seen.append(1)

    seen: list[int] = []
    handles = [module.register_forward_hook(look) for module in names]
    try:
        run.executor.evaluate(step, [run.view.batch(batch) for batch in run.data.step(step)])
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


# ------------------------------------------------------------------ a loss far off


class Spikes:
    """Compares each loss with those before it, by the median and the median absolute deviation."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def score(self, loss: float) -> float:
        """Robust z-score of a loss against the last ones (0 while there are few); remembers it unless it is a spike."""
        score = 0.0
        if len(self._losses) >= FEWEST:
            middle = statistics.median(self._losses)
            spread = statistics.median(abs(x - middle) for x in self._losses)
            score = 0.6745 * (loss - middle) / max(spread, 1e-6 * abs(middle), 1e-12)
        if score <= self.limit:
            self._losses.append(loss)
        return score

    def words(self, loss: float, score: float) -> str:
        """A spike in words."""
        middle = statistics.median(self._losses)
        return f"the loss is {loss:.4g}, {score:.0f} robust deviations above the median {middle:.4g} of the last {len(self._losses)} steps"


class SpikeGuard:
    """Looks at every loss, on all ranks alike, and does what `on_spike` says.

    skip: `veto` keeps the update from being made. stop, roll_back: `look`, after the update, raises. Rank 0 reports.
    """

    def __init__(self, config: Any, report: Report | None) -> None:
        self._spikes, self._policy = Spikes(config.spike), config.on_spike
        self._skip, self._left = config.roll_back_skip, config.roll_backs
        self._report, self._backs = report, 0

    def veto(self, step: int, loss: float, norm: float) -> str:
        """Why the update is not made; empty where it is."""
        del norm
        cause = self._cause(step, loss, "; the update was left out") if self._policy == "skip" else ""
        return f"spike: {cause}" if cause else ""

    def look(self, step: int, loss: float) -> None:
        """After the update. Raises PartitaError or RollBack."""
        cause = "" if self._policy == "skip" else self._cause(step, loss, "")
        if not cause or self._policy == "warn":
            return
        if self._policy == "roll_back" and self._left:
            self._left, self._backs = self._left - 1, self._backs + 1
            raise RollBack(f"step {step}: {cause}", self._skip)
        more = f" (after {self._backs} roll-backs, as many as diagnosis.roll_backs allows)" if self._backs else ""
        raise PartitaError(f"step {step}: {cause}{more}\n    -> go on from an earlier checkpoint, with a lower optimizer.lr")

    def _cause(self, step: int, loss: float, done: str) -> str:
        score = self._spikes.score(loss) if math.isfinite(loss) else 0.0
        if score <= self._spikes.limit:
            return ""
        cause = self._spikes.words(loss, score)
        if self._report is not None:
            about: Any = f"{step}, after {self._backs} roll-backs" if self._backs else step
            likely = "bad samples or too high a learning rate are likely"
            self._report.add("spike", step, f"{cause}: {likely}{done}", about=about, score=score)
        return cause


# ------------------------------------------------------------------ replicas


@torch.no_grad()
def compare_replicas(run: Any, step: int, report: Report) -> None:
    """Compare a hash of each parameter with those of the other ranks that must hold the same. Collective."""
    families: dict[Any, tuple[Any, list[Any]]] = {}
    for bucket in run.engine.buckets:  # whole weights are the same along both groups of a bucket, cut ones along the replicas
        for kind in ("replicas",) if bucket.cut else ("shard", "replicas"):
            group = getattr(bucket.groups, kind)
            families.setdefault((bucket.cut, kind, group.ranks), (group, []))[1].append(bucket)
    for group, buckets in families.values():
        _compare(run, step, report, buckets, group)


def _compare(run: Any, step: int, report: Report, buckets: list[Any], group: Any) -> None:
    if group.size < 2 or not buckets:
        return
    names, values = [], []
    for bucket in buckets:
        bucket.wait_gathered()
        if not bucket.cut:
            names += [s.name for s in bucket.layout.segments]
            values += [bucket.full[s.offset : s.offset + s.numel] for s in bucket.layout.segments]
    if buckets[0].cut:
        held = {f"model.{s.name}" for bucket in buckets for s in bucket.layout.segments}
        pieces = [s for s in run.engine.load_slices() if s.key in held and s.data.numel()]
        names, values = [s.key.removeprefix("model.") for s in pieces], [s.data for s in pieces]
    if not values:
        return
    table = torch.stack([torch.stack([_hash(v), _largest(v)]) for v in values]).to(run.mesh.device)
    everyone = torch.empty(group.size * table.numel(), dtype=table.dtype, device=table.device)
    dist.all_gather_into_tensor(everyone, table.view(-1), group=group.process_group)
    rows = everyone.view(group.size, len(names), 2)
    for i, name in enumerate(names):
        hashes = rows[:, i, 0].tolist()
        if len(set(hashes)) > 1:
            _tell(run, step, report, name, hashes, rows[:, i, 1].tolist(), group)
            return


def _hash(values: torch.Tensor) -> torch.Tensor:
    """Sum of the bit patterns, each with a weight of its own place: a single changed bit changes it."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.view(kinds[values.element_size()]).to(torch.int64)
    return (bits * (torch.arange(bits.numel(), device=bits.device) * 2 + 1)).sum()


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Bits of the largest magnitude as float64, in an int64."""
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    return values.abs().amax().double().nan_to_num(1e308, 1e308).view(torch.int64)


def _tell(run: Any, step: int, report: Report, name: str, hashes: list[int], bits: list[int], group: Any) -> None:
    common = max(set(hashes), key=hashes.count)
    odd = [i for i, h in enumerate(hashes) if h != common]
    sizes = torch.tensor(bits).view(torch.float64).tolist()
    why = "the others agree"
    if 2 * len(odd) >= len(hashes):  # no majority: the copy with the largest number is the likely one
        odd = [max(range(len(sizes)), key=lambda i: sizes[i])]
        why = f"the copies are {len(hashes)}, and this one has the largest number, {sizes[odd[0]]:.3g}"
    ranks = [group.ranks[i] for i in odd]
    if run.rank == group.ranks[0]:
        cause = (
            f"the copies of {name} differ between ranks; that of rank {', '.join(map(str, ranks))} is likely wrong ({why}): "
            "a flipped bit, or an update that not all ranks made"
        )
        report.add("replicas", step, cause, about=name, ranks=ranks)


# ------------------------------------------------------------------ silent corruption


def compare_recomputed(run: Any, step: int, report: Report) -> None:
    """Compute the loss of a batch twice: equal to the bit on a machine that works. Collective where weights are cut."""
    with _training_rng():
        batch = [run.view.batch(run.data.step(step)[0])]
        first, second = (run.executor.evaluate(step, batch) for _ in range(2))
    if not torch.equal(first, second):
        cause = (
            f"rank {run.rank} computes {first[0].item()!r} and {second[0].item()!r} from the same batch and weights: "
            "its device corrupts numbers silently; take it out"
        )
        report.add("corruption", step, cause, about=run.rank)


@contextmanager
def _training_rng() -> Any:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
