"""How a checkpoint comes to be: in the background, whole or not at all, by agreement of all ranks, and how long it stays."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import ranks
from pool import run_ranks

from partita.errors import CheckpointError
from partita.train import saving, shards
from partita.train.checkpoint import list_checkpoints, read_weights, verify

MB = 1 << 20


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> float:
    """Every write of a chunk takes this many seconds longer."""
    write = shards._write_all
    monkeypatch.setattr(shards, "_write_all", lambda *a: (time.sleep(0.25), write(*a)))
    return 0.25


# ------------------------------------------------------------------ in the background


def test_a_save_holds_the_state_of_its_step(tmp_path: Path, slow: float) -> None:
    """Training goes on, and changes everything, while a slow writer saves: the file has the numbers of the boundary."""
    state = {f"model.{i}": torch.full((MB // 4,), 3.0) for i in range(8)}
    extra: dict[str, Any] = {"step": 3, "list": [3]}
    savers = ranks.checkpointers(tmp_path, 2)
    started = time.perf_counter()
    for c, slices in zip(savers, ranks.even(state, 2), strict=True):
        c.save(3, slices, extra, {})
    assert time.perf_counter() - started < slow  # the copy, not the writing
    for tensor in state.values():
        tensor.fill_(4.0)
    extra["step"] = extra["list"][0] = 4
    savers[0].poll()
    assert savers[0].latest() is None and not savers[0].path(3).exists()
    assert ranks.outcomes(savers) == [None, None]
    assert all(w.eq(3.0).all() for w in read_weights(tmp_path).values())
    assert savers[0].load(savers[0].path(3), [])[0] == {"step": 3, "list": [3]}


def test_a_second_save_waits_for_the_first(tmp_path: Path, slow: float) -> None:
    """Both are complete, with the numbers of their own steps."""
    savers = ranks.checkpointers(tmp_path, 2)
    for step in (1, 2):
        for c, slices in zip(savers, ranks.even(ranks.full(step, MB), 2), strict=True):
            c.save(step, slices, {}, {})
    assert ranks.outcomes(savers) == [None, None]
    for step in (1, 2):
        assert read_weights(tmp_path / f"step-0000000{step}")["x"].eq(step).all()


def test_synchronous_saves_are_complete_when_they_return(tmp_path: Path) -> None:
    """And raise at once."""
    c = ranks.checkpointer(tmp_path, asynchronous=False)
    c.save(1, ranks.even(ranks.full(1, 8), 1)[0], {}, {})
    assert c.latest() == tmp_path / "step-00000001"
    with pytest.raises(CheckpointError, match="saved by no rank"):
        c.save(2, ranks.cut(ranks.full(1, 8), [0, 7, 8])[0], {}, {})


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    """16 MB of states, 20 saves: under 5 % more after the 20th than after the 5th."""
    state, savers, seen = ranks.full(1, 4 * MB), ranks.checkpointers(tmp_path, 1), {}
    for step in range(1, 21):
        assert ranks.save(savers, step, state) == [None]
        seen[step] = _resident()
    assert seen[20] - seen[5] < 0.05 * 16 * MB


def peak_of_load(rank: int, world: int, folder: str) -> tuple[int, bool]:
    """Memory at the peak of a load beyond what was there before it, the rank's own shard included there."""
    c = ranks.checkpointer(Path(folder), rank, world, life="x")
    state = ranks.full(0, 8 * MB)
    slices = ranks.even(state, world)[rank]
    slices = [s.__class__(s.key, s.shape, s.dtype, s.lo, s.hi, s.data.clone()) for s in slices]
    c.load(folder, slices)  # what is made once: imports, caches
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident()
    c.load(folder, slices)
    peak = next(int(x.split()[1]) * 1024 for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return peak - before, bool(slices[0].data.eq(7).all())


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc/self/clear_refs")
def test_a_load_needs_memory_for_a_chunk_only(tmp_path: Path) -> None:
    """4 ranks, 32 MB: none holds the others' shards while it reads its own."""
    ranks.save(ranks.checkpointers(tmp_path, 2), 1, ranks.full(7, 8 * MB))
    for extra, right in run_ranks(4, peak_of_load, str(tmp_path)):
        assert right and extra < shards.CHUNK + 4 * MB


# ------------------------------------------------------------------ bytes of a shard


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, shards.CHUNK + 5, 3 * shards.CHUNK])
def test_bytes_past_the_page_cache_and_through_it_are_the_same(size: int, tmp_path: Path) -> None:
    aligned = shards.host_buffer(size, pinned=False)
    assert aligned.data_ptr() % shards.PAGE == 0
    aligned.copy_(torch.arange(size) % 251)
    odd = torch.empty(size + 65, dtype=torch.uint8)[65:].copy_(aligned)
    sums = [shards.write_shard(tmp_path / name, data, lambda: None) for name, data in (("a", aligned), ("b", odd))]
    assert sums[0] == sums[1] == shards.checksums(odd)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == odd.numpy().tobytes()
    assert len(sums[0]) == 8 * -(-size // shards.BLOCK)


def test_an_error_of_any_writer_is_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [5]

    def refuse(_bytes: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "before_write", refuse)
    with pytest.raises(OSError, match="No space left"):
        shards.write_shard(tmp_path / "a", shards.host_buffer(9 * shards.CHUNK, pinned=False), lambda: None)


# ------------------------------------------------------------------ failure


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=10, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=10, check=True)


def test_a_full_disk_costs_the_save_only(small_disk: Path) -> None:
    """4 MB onto 1 MB, 2 ranks: the same error on both with path and bytes, nothing half there, `latest` as it was; later saves work."""
    savers = ranks.checkpointers(small_disk, 2)
    assert ranks.save(savers, 1, ranks.full(1, 1000)) == [None, None]
    found = ranks.save(savers, 2, ranks.full(2, MB))
    assert found[0] == found[1]
    for part in (f"{small_disk}/step-00000002.", "/rank-0000", "needs 2,162,688 bytes", "are free", "train.keep"):
        assert part in str(found[0])
    assert [n for n in ranks.names(small_disk) if not n.endswith(".failed")] == ["latest", "step-00000001"]
    assert savers[1].latest() == small_disk / "step-00000001"
    assert ranks.save(savers, 3, ranks.full(3, 1000)) == [None, None]
    assert read_weights(small_disk)["x"].eq(3).all()
    assert ranks.names(small_disk) == ["latest", "step-00000001", "step-00000003"]


def test_one_rank_without_space(small_disk: Path) -> None:
    """Each part alone would fit, all together don't: space is reserved, so one rank finds out before it writes, and both are told."""
    savers = ranks.checkpointers(small_disk, 2)
    state = ranks.full(1, 350_000)
    for c, slices in zip(savers, ranks.cut(state, [0, 200_000, 350_000]), strict=True):
        c.save(1, slices, {}, {})
    found = ranks.outcomes(savers)
    assert found[0] == found[1] and "no space left on the device" in str(found[0])
    assert not [n for n in ranks.names(small_disk) if not n.endswith(".failed")]


def test_a_disk_without_a_single_block(small_disk: Path) -> None:
    """Not even the reason can be written: all ranks hear of the failure nevertheless, and soon."""
    savers = ranks.checkpointers(small_disk, 2)
    with (small_disk / "filler").open("wb") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), b"x" * 4096)
    started = time.perf_counter()
    found = ranks.save(savers, 1, ranks.full(1, 1000))
    assert all("could not be written" in str(f) for f in found) and time.perf_counter() - started < 15
    (small_disk / "filler").unlink()
    assert ranks.save(savers, 2, ranks.full(2, 1000)) == [None, None]


def test_errors_are_met_once_and_the_next_save_runs_on_all_ranks(tmp_path: Path) -> None:
    """A rank that has polled the error and one that has not go on alike."""
    savers = ranks.checkpointers(tmp_path, 2)
    for c, slices in zip(savers, ranks.even(ranks.full(1, 8), 3)[:2], strict=True):
        c.save(1, slices, {}, {})  # a third of the tensor is missing
    savers[0]._thread.join(20)
    with pytest.raises(CheckpointError, match=r"model\.x: elements 5 to 8 are saved by no rank"):
        savers[0].poll()
    savers[0].poll()
    parts = ranks.even(ranks.full(2, 8), 2)
    savers[0].save(2, parts[0], {}, {})
    with pytest.raises(CheckpointError, match="step 1"):
        savers[1].save(2, parts[1], {}, {})
    assert ranks.outcomes(savers) == [None, None]
    assert read_weights(tmp_path)["x"].eq(2).all()


def test_parts_that_overlap_or_differ_are_refused(tmp_path: Path) -> None:
    """An element saved by two ranks, or a shape on which they differ, is a mistake of the caller's."""
    savers = ranks.checkpointers(tmp_path, 2)
    for c in savers:
        c.save(1, ranks.even(ranks.full(1, 8), 1)[0], {}, {})
    assert all("elements from 0 are saved twice" in str(f) for f in ranks.outcomes(savers))
    for c, shape in zip(savers, ((8,), (4, 2)), strict=True):
        c.save(2, ranks.even(ranks.full(1, *shape), 1)[0], {}, {})
    assert all("float32 [4, 2] on rank 1, float32 [8] on another" in str(f) for f in ranks.outcomes(savers))


@pytest.mark.parametrize("absent", [0, 1])
def test_a_save_by_one_rank_alone_names_its_caller(absent: int, tmp_path: Path) -> None:
    """Patience is bounded, and the error names who is missing."""
    savers = ranks.checkpointers(tmp_path, 2, patience=1.0)
    savers[1 - absent].save(1, ranks.even(ranks.full(1, 8), 2)[1 - absent], {}, {})
    with pytest.raises(
        CheckpointError,
        match=rf"rank {1 - absent} called save at .*test_checkpoint_saving.py:\d+, and ranks \[{absent}\] have not",
    ):
        savers[1 - absent].wait()
    assert savers[0].latest() is None


def test_closing_ends_soon_without_the_other_ranks(tmp_path: Path) -> None:
    """After a failure elsewhere nobody else may be there: what is incomplete is given up."""
    savers = ranks.checkpointers(tmp_path, 2)
    for c in savers[:1]:
        c.save(1, ranks.even(ranks.full(1, 8), 2)[0], {}, {})
    started = time.perf_counter()
    savers[0].close(grace=0.2)
    savers[1].close()
    assert time.perf_counter() - started < 2 and savers[0].latest() is None


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """The error names it and the way out; so do settings that make no sense."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints can't be used.*run\.dir"):
        ranks.checkpointer(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"train\.keep=0"):
        ranks.checkpointer(tmp_path, keep=0)


# ------------------------------------------------------------------ killed


def _save_forever(folder: Path, rank: int, world: int, life: str, first: int) -> None:
    """A rank that does nothing but save; each tensor of step k is full of k."""
    torch.set_num_threads(1)
    c = ranks.checkpointer(folder, rank, world, life, keep=2)
    step = first
    while True:
        c.save(step, ranks.even(ranks.full(step, 300_000), world)[rank], {"step": step}, {})
        step += 1


def test_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    """2 ranks, 25 lives ended by SIGKILL: what `latest` names is whole, of one step, and not older than a life before; no rubbish stays."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice, step, progressed = random.Random(seed), 0, 0
    for life in range(25):
        recovered = ranks.checkpointer(tmp_path)
        assert not [n for n in ranks.names(tmp_path) if n.endswith((".tmp", ".old", ".new", ".failed"))]
        pids, first = [], step + dice.randrange(2)  # on, or once more the same step
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    _save_forever(tmp_path, rank, 2, f"life{life}", first)
                os._exit(1)
            pids.append(pid)
        end = time.monotonic() + 10 * (life % 2)  # every second life gets somewhere, however slow the machine
        while time.monotonic() < end and recovered.latest() in (None, recovered.path(step)):
            time.sleep(0.002)
        time.sleep(dice.uniform(0.0, 0.06))
        for pid in dice.sample(pids, 2):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        latest = recovered.latest()
        if latest is None:
            continue
        found = int(latest.name[5:])
        assert found >= step - 1
        progressed += found > step
        step = found
        for info in list_checkpoints(tmp_path):
            verify(info.path)
            assert read_weights(info.path)["x"].eq(info.step).all()
    assert progressed >= 6  # of the lives that were given time


def _save_until(folder: Path, step: int, operation: int) -> None:
    """Save in this process, which is killed before its n-th change of the file system."""
    torch.set_num_threads(1)
    c = ranks.checkpointer(folder, keep=2, keep_best=1)
    left = [operation]

    def count(event: str, details: tuple[Any, ...]) -> None:
        writes = event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    assert ranks.save([c], step, ranks.full(step + 0.5, 1000), score=1.0) == [None]


@pytest.mark.parametrize("step", [3, 2])
def test_kill_before_each_change_of_the_file_system(step: int, tmp_path: Path) -> None:
    """A new step, which lets an old one go, and one that replaces a step that is there: killed at every point where it could be."""
    operation, alive = 0, False
    for old in (1, 2):
        ranks.save(ranks.checkpointers(tmp_path / "before", 1), old, ranks.full(old, 1000), score=2.0)
    while not alive:
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(operation)))
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                _save_until(folder, step, operation)
                os._exit(0)
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        alive = status == 0
        assert alive or os.WTERMSIG(status) == signal.SIGKILL
        assert read_weights(folder)["x"].unique().tolist() in ([1.0], [2.0], [step + 0.5])  # a reader that clears nothing
        c = ranks.checkpointer(folder)
        assert {n for n in ranks.names(folder) if not n.startswith("step-0")} <= {"latest", "best.json"}
        found = {i.step: read_weights(i.path)["x"].unique().tolist() for i in list_checkpoints(folder) if verify(i.path)}
        assert len(found) >= 2 and all(values in ([k], [k + 0.5]) for k, values in found.items())
        assert c.latest() in (c.path(2), c.path(step))
        operation += 1
    assert found[step] == [step + 0.5] and operation > 15


def test_a_start_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    """Unfinished folders go; a checkpoint that had stepped aside for one of the same step comes back."""
    ranks.save(ranks.checkpointers(tmp_path, 1), 5, ranks.full(5, 8))
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old")
    (tmp_path / "step-00000006.abc-1.tmp").mkdir()
    (tmp_path / "step-00000006.abc-1.tmp" / "rank-00000.bin").write_bytes(b"half")
    (tmp_path / "step-00000006.abc-1.failed").write_text("full")
    (tmp_path / "latest.new").write_text("step-0000")
    (tmp_path / "notes.txt").write_text("a person's")
    assert ranks.checkpointer(tmp_path, 1, 2).latest() is None  # only rank 0 clears
    c = ranks.checkpointer(tmp_path)
    assert ranks.names(tmp_path) == ["latest", "notes.txt", "step-00000005"]
    assert c.latest() == tmp_path / "step-00000005"


# ------------------------------------------------------------------ which ones stay


def _steps(folder: Path) -> list[int]:
    return sorted(i.step for i in list_checkpoints(folder))


def test_the_newest_stay(tmp_path: Path) -> None:
    """Keep 2 of 4; `latest` names the last."""
    savers = ranks.checkpointers(tmp_path, 2, keep=2)
    for step in (1, 2, 3, 4):
        assert ranks.save(savers, step, ranks.full(step, 8)) == [None, None]
    assert _steps(tmp_path) == [3, 4] and (tmp_path / "latest").read_text() == "step-00000004\n"
    assert ranks.names(tmp_path) == ["latest", "step-00000003", "step-00000004"]


def test_a_used_folder_with_later_steps(tmp_path: Path) -> None:
    """Newest means saved last: going on from an earlier step never deletes what was just written, and replaces a step that is there."""
    ranks.save(ranks.checkpointers(tmp_path, 1, keep=3), 500, ranks.full(1, 8))
    ranks.save(ranks.checkpointers(tmp_path, 1, keep=3), 700, ranks.full(1, 8))
    savers = ranks.checkpointers(tmp_path, 2, keep=2)
    ranks.save(savers, 100, ranks.full(100, 8))
    assert _steps(tmp_path) == [100, 700]
    ranks.save(savers, 200, ranks.full(200, 8))
    assert _steps(tmp_path) == [100, 200] and savers[0].latest() == tmp_path / "step-00000200"
    ranks.save(ranks.checkpointers(tmp_path, 1), 100, ranks.full(-1, 4))
    assert _steps(tmp_path) == [100, 200] and savers[0].latest() == tmp_path / "step-00000100"
    assert read_weights(tmp_path)["x"].eq(-1).all()
    assert ranks.names(tmp_path) == ["latest", "step-00000100", "step-00000200"]


def test_the_best_stay_as_well(tmp_path: Path) -> None:
    """Lowest score wins; none and not-a-number never do; the list is in best.json."""
    savers = ranks.checkpointers(tmp_path, 1, keep=1, keep_best=2)
    for step, score in enumerate([2.0, 0.5, 3.0, float("nan"), 0.7, None, 4.0], 1):
        ranks.save(savers, step, ranks.full(step, 8), score=score)
    assert _steps(tmp_path) == [2, 5, 7]
    best = json.loads((tmp_path / "best.json").read_text())["best"]
    assert [(b["step"], b["score"]) for b in best] == [(2, 0.5), (5, 0.7)]


def test_latest_that_points_nowhere(tmp_path: Path) -> None:
    """Somebody removed a folder by hand: the one saved last of the rest counts."""
    savers = ranks.checkpointers(tmp_path, 1)
    for step in (1, 2):
        ranks.save(savers, step, ranks.full(step, 8))
    saving.remove_folder(tmp_path / "step-00000002")
    assert savers[0].latest() == tmp_path / "step-00000001"
    ranks.save(savers, 3, ranks.full(3, 8))
    assert savers[0].latest() == tmp_path / "step-00000003"


# ------------------------------------------------------------------ with a process group


def save_in_group(rank: int, world: int, folder: str) -> tuple[str, str]:
    """The name of a start is agreed on by the ranks themselves."""
    from partita.plan.plan import Layout
    from partita.runtime.mesh import Mesh
    from partita.train.checkpoint import Checkpointer

    c = Checkpointer(folder, Mesh(Layout(replicate=world), rank, torch.device("cpu")))
    c.save(1, ranks.even(ranks.full(1, 1000), world)[rank], {}, {"rank": rank})
    c.wait()
    return c._life, str(c.latest())


def test_ranks_agree_on_a_name(tmp_path: Path) -> None:
    """Twice in the same folder: another name, and the same result."""
    (tmp_path / "step-00000001.old-1.tmp").mkdir()
    first, second = (run_ranks(3, save_in_group, str(tmp_path)) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1 and first[0][0] != second[0][0]
    assert ranks.names(tmp_path) == ["latest", "step-00000001"] and verify(tmp_path) > 0


def test_ranks_without_a_group_are_told(tmp_path: Path) -> None:
    """Names that differ would never meet."""
    from partita.plan.plan import Layout
    from partita.runtime.mesh import Mesh
    from partita.train.checkpoint import Checkpointer

    with pytest.raises(CheckpointError, match="2 ranks need a process group"):
        Checkpointer(tmp_path, Mesh(Layout(replicate=2), 0, torch.device("cpu")))
