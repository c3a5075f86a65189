"""Snapshots in memory: complete or not there, for other layouts, across nodes of which one is lost, and in whole runs."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import commands
import ranks
from pool import run_ranks

from partita.plan.plan import Layout
from partita.runtime.mesh import Mesh
from partita.train.index import Index
from partita.train.loading import load_slices
from partita.train.memory import MemorySnapshots
from partita.train.neighbour import neighbour_of

SIZE = 300_001


def snapshots(rank: int, world: int, folder: str, nodes: int) -> MemorySnapshots:
    """As if the ranks were on `nodes` machines: each with a memory of its own."""
    return MemorySnapshots(
        Path(folder) / f"node{rank * nodes // world}", Mesh(Layout(replicate=world), rank, torch.device("cpu"))
    )


def save_some(rank: int, world: int, folder: str, nodes: int, last: int) -> list[str]:
    """Snapshots of steps 1 to `last`, changed right after each; what lies in this node's memory then."""
    memory = snapshots(rank, world, folder, nodes)
    state = ranks.full(0, SIZE)
    for step in range(1, last + 1):
        state["model.x"].copy_(torch.arange(SIZE) + step)
        memory.save(step, ranks.even(state, world)[rank], {"step": step}, {"rank": rank})
        state["model.x"].zero_()
    memory._settle()
    dist.barrier()
    memory.close()
    return ranks.names(memory.folder)


def restore(rank: int, world: int, folder: str, nodes: int, at_least: int) -> Any:
    """(step, whether this rank's part is right, own values, shards in this node's memory), or None."""
    memory = snapshots(rank, world, folder, nodes)
    state = ranks.full(0, SIZE)
    slices = ranks.even(state, world)[rank]

    def needed(index: Index) -> set[int]:
        return {p.rank for s in slices for p in index.tensors[s.key].overlaps(s.lo, s.hi)}

    path = memory.restore(needed, at_least)
    memory.close()
    if path is None:
        return None
    index, _ = load_slices(path, slices)
    right = all(torch.equal(s.data, (torch.arange(s.lo, s.hi) + index.step).float()) for s in slices)
    return index.step, right, index.extra, [p.name for p in sorted(path.glob("*.bin"))]


def test_the_newest_whole_one_comes_back_in_any_number_of_ranks(tmp_path: Path) -> None:
    for names in run_ranks(3, save_some, str(tmp_path), 1, 4):
        assert [n for n in names if n.startswith("step-")] == [n for n in names if n.startswith("step-00000004")]
        assert sum(n.endswith(".memory") for n in names) == 6
    for world in (3, 2, 4):
        for step, right, extra, _ in run_ranks(world, restore, str(tmp_path), 1, 4):
            assert (step, right, extra) == (4, True, {"step": 4})
    assert run_ranks(2, restore, str(tmp_path), 1, 5) == [None, None]  # the disk has a newer one


def test_a_part_that_is_missing_leaves_the_one_before(tmp_path: Path) -> None:
    """Rank 1 had not completed the newest one: that of the step before was kept."""
    memory_of = str(tmp_path)
    run_ranks(2, save_two, memory_of)
    for step, right, _, _ in run_ranks(2, restore, memory_of, 1, 0):
        assert (step, right) == (1, True)


def save_two(rank: int, world: int, folder: str) -> None:
    memory = snapshots(rank, world, folder, 1)
    for step in (1, 2):
        state = {"model.x": torch.arange(SIZE).float() + step}
        if step == 2 and rank == 1:
            memory._finish = lambda *_: None  # type: ignore[method-assign]  # killed before its part was complete
        memory.save(step, ranks.even(state, world)[rank], {"step": step}, {})
    assert memory._thread is not None
    memory._thread.join()
    memory.close()


def test_a_lost_node_gets_its_parts_from_the_next(tmp_path: Path) -> None:
    """4 ranks on 2 nodes; one node's memory is gone. Each rank has its part back, and only what is missing has travelled."""
    run_ranks(4, save_some, str(tmp_path), 2, 3)
    shutil.rmtree(tmp_path / "node1")
    found = run_ranks(4, restore, str(tmp_path), 2, 3)
    assert all(step == 3 and right for step, right, _, _ in found)
    assert [n[5:10] for n in found[0][3]] == ["00000", "00001", "00002", "00003"]  # its own, and the copies
    assert [n[5:10] for n in found[2][3]] == ["00002", "00003"]
    shutil.rmtree(tmp_path / "node0")
    shutil.rmtree(tmp_path / "node1")
    assert run_ranks(4, restore, str(tmp_path), 2, 0) == [None] * 4


def test_who_keeps_whose_copies() -> None:
    assert [neighbour_of(r, "aabbcc") for r in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [neighbour_of(r, "aaab") for r in range(4)] == [3, 3, 3, 0]


def test_a_run_that_lost_a_rank_goes_on_from_memory(tmp_path: Path) -> None:
    """Nothing is on the disk. Every loss is that of the run that nobody disturbed, and nothing is left."""
    batch = ("train.global_batch=12", "lr_schedule=constant", "train.steps=100", "train.save_at_end=false")
    commands.train(tmp_path / "whole", *batch, "parallel.data=1")
    restarts = ("launch.restarts=1", "launch.cooldown=600", "train.memory_every=2", "+strategy=zero2", "parallel.data=3")
    before = set(os.listdir("/dev/shm"))
    process = commands.start(tmp_path / "run", *batch, *restarts)
    commands.wait_for_step(tmp_path / "run", 21, process)
    os.kill(commands.ranks_of(process)[-1], signal.SIGKILL)
    assert process.wait(timeout=120) == 0, (tmp_path / "run.out").read_text()[-3000:]
    out = (tmp_path / "run.out").read_text()
    assert "going on with 2 of 3 ranks" in out
    resumed = next(line for line in out.splitlines() if line.startswith("resumed from"))
    assert "/memory/step-" in resumed and int(resumed.split("after step ")[1].split()[0]) >= 18
    assert commands.column(tmp_path / "run", "loss") == pytest.approx(commands.column(tmp_path / "whole", "loss"), rel=1e-5)
    assert not (tmp_path / "run" / "memory").exists() and set(os.listdir("/dev/shm")) == before
