"""States in tiers: the same bits as without, whatever the placement, the place and the fraction; errors of disks have words."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import engine_runs
import tier_runs
from pool import run_ranks

from partita.errors import PartitaError
from partita.plan.plan import Tier, Tiers
from partita.state.tiers import TierRequest, aligned_empty
from partita_offload.direct import DirectFile, probe
from partita_offload.file import FileTier

HOST = {"optimizer": "host", "gradients": "host"}
MIXED = {"optimizer": "file", "gradients": "host"}
EVERYTHING = {"parameters": "file", "optimizer": "file", "gradients": "file"}
# placement, places, ranks, micro-batches, precision, fraction, elements of an extent
RUNS = [
    ("replicated", HOST, 1, 1, "bf16", 1.0, 1 << 20),
    ("replicated", MIXED, 2, 2, "fp32", 0.4, 1024),
    ("optimizer", {"optimizer": "host"}, 2, 2, "fp32", 0.4, 1024),
    ("optimizer", {"gradients": "file"}, 2, 1, "bf16", 1.0, 1024),
    ("gradients", HOST, 2, 2, "fp32", 1.0, 1 << 20),
    ("gradients", MIXED, 4, 2, "bf16", 1.0, 1024),
    ("gradients", {"gradients": "host"}, 2, 2, "fp32", 0.4, 1024),
    ("parameters", HOST | {"parameters": "host"}, 2, 2, "fp32", 1.0, 1 << 20),
    ("parameters", EVERYTHING, 2, 2, "fp32", 1.0, 1024),
    ("parameters", EVERYTHING, 4, 1, "bf16", 0.4, 1024),
    ("parameters", {"parameters": "file"}, 2, 1, "bf16", 0.4, 1024),
    ("parameters", EVERYTHING, 1, 2, "bf16", 1.0, 1024),  # weights stream through a single device
]


@cache
def plain(placement: str, world: int, micro: int, precision: str, replicate: int, rule: str) -> Any:
    plan = {"micro_batches": micro, "precision": tier_runs.PRECISIONS[precision], "replicate": replicate}
    return run_ranks(world, tier_runs.train, placement, rule, 4, 8, 0.5, 1024, kwargs=plan, timeout=60)


def assert_same(got: Any, wanted: Any) -> None:
    assert got[0] == wanted[0]
    assert got[1] == wanted[1]
    for mine, theirs in ((got[2], wanted[2]), (got[3], wanted[3])):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key


@pytest.mark.parametrize(("placement", "places", "world", "micro", "precision", "fraction", "extent"), RUNS)
def test_same_bits_as_without(
    placement: str, places: Any, world: int, micro: int, precision: str, fraction: float, extent: int, tmp_path: Path
) -> None:
    wanted = plain(placement, world, micro, precision, 1, "adamw")
    plan = {
        "micro_batches": micro,
        "precision": tier_runs.PRECISIONS[precision],
        "tiers": tier_runs.tiers_of(str(tmp_path), fraction, **places),
    }
    got = run_ranks(world, tier_runs.train, placement, "adamw", 4, 8, 0.5, extent, kwargs=plan, timeout=60)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_same(mine, theirs)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("places", [HOST, EVERYTHING])
def test_same_bits_with_replicas_and_momentum(places: Any, tmp_path: Path) -> None:
    wanted = plain("parameters", 4, 2, "fp32", 2, "sgd")
    plan = {"micro_batches": 2, "replicate": 2, "tiers": tier_runs.tiers_of(str(tmp_path), **places)}
    got = run_ranks(4, tier_runs.train, "parameters", "sgd", 4, 8, 0.5, 1024, kwargs=plan, timeout=60)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize(("before", "after"), [("file", "file"), ("host", ""), ("", "file"), ("file", "host")])
def test_resumes_from_one_home_in_another(before: str, after: str, tmp_path: Path) -> None:
    """The same layout goes on bit for bit; and what 2 ranks saved, 1 rank loads."""
    folder = str(tmp_path / "checkpoints")
    run_ranks(2, tier_runs.save, "parameters", before, folder, timeout=60)
    wanted = run_ranks(2, tier_runs.resume, "parameters", "", folder, timeout=60)
    for mine, theirs in zip(run_ranks(2, tier_runs.resume, "parameters", after, folder, timeout=60), wanted, strict=True):
        assert_same(mine, theirs)
    (alone,) = run_ranks(1, tier_runs.resume, "gradients", after, folder, timeout=60)
    for key, value in wanted[0][2].items():
        torch.testing.assert_close(alone[2][key], value, rtol=1e-4, atol=2e-6)


def test_fractions_that_differ_are_refused() -> None:
    tiers = Tiers(gradients=Tier("host", 0.5), optimizer=Tier("host", 1.0))
    with pytest.raises(PartitaError, match="one fraction"):
        engine_runs.make_engine(0, engine_runs.make_plan(1, "replicated", tiers=tiers), "adamw")


# ------------------------------------------------------------------ files


def test_odd_sizes_and_places_come_back(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    file.grow(40 << 20)
    generator = torch.Generator().manual_seed(0)
    for offset, numel in ((0, 1), (4096, 1025), (1 << 20, 2_500_003)):
        for source in (torch.randn(numel, generator=generator), aligned_empty(numel, torch.float32).normal_(generator=generator)):
            file.write(offset, source).wait()
            for into in (torch.empty(numel), aligned_empty(numel, torch.float32)):
                file.read(offset, into).wait()
                assert torch.equal(into, source)
    with pytest.raises(ValueError, match="no multiple"):
        file.read(64, torch.empty(1))
    file.close()


def test_stores_begin_as_zeros_and_map(tmp_path: Path) -> None:
    tier = FileTier(TierRequest(torch.device("cpu"), 0, str(tmp_path)))
    tier.reserve(3 * 10_000 * 4)
    assert tier.bandwidth["read"] > 0
    assert tier.bandwidth["write"] > 0
    stores = [tier.allocate(10_000, torch.float32) for _ in range(3)]
    stores[1].write(0, torch.arange(10_000.0)).wait()
    for store, wanted in zip(stores, (torch.zeros(10_000), torch.arange(10_000.0), torch.zeros(10_000)), strict=True):
        assert torch.equal(store.mapped(), wanted)
    stores[2].mapped().fill_(7)
    stores[2].flush()
    into = torch.empty(10_000)
    stores[2].read(0, into).wait()
    assert torch.equal(into, torch.full_like(into, 7))
    stores[2].write(0, torch.zeros(10_000)).wait()
    assert not stores[2].mapped().any()
    tier.close()


def test_a_disk_without_room_is_named_before_the_run(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    with pytest.raises(PartitaError) as caught:
        file.grow(1 << 60)
    assert str(tmp_path) in str(caught.value)
    assert f"{1 << 60:,} bytes" in str(caught.value)
    assert "are free" in str(caught.value)
    assert "larger disk" in str(caught.value)
    file.close()


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PartitaError, match=r"offload\.path=.*can't be used"):
        DirectFile(tmp_path / "file" / "below")


def test_a_read_that_comes_short_is_an_error(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    file.grow(1 << 20)
    os.ftruncate(file.handle, 4096)
    with pytest.raises(PartitaError, match=r"could not be read: .*(?s:.)*train\.resume=auto"):
        file.read(0, torch.empty(100_000)).wait()
    file.close()


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_that_meets_a_bad_disk_ends_the_run(world: int, tmp_path: Path) -> None:
    for message in run_ranks(world, tier_runs.broken_disk, str(tmp_path), timeout=60):
        assert str(tmp_path) in message
        assert "could not be read" in message


def test_file_systems_without_direct_io_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert "refuses O_DIRECT" in probe(tmp_path)
    tier = FileTier(TierRequest(torch.device("cpu"), 0, str(tmp_path)))
    with caplog.at_level("WARNING", "partita"):
        tier.reserve(100)
    assert "page cache" in caplog.text
    store = tier.allocate(5, torch.float32)
    store.write(0, torch.arange(5.0)).wait()
    assert store.mapped().tolist() == [0, 1, 2, 3, 4]
    tier.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on private memory is Linux's")
def test_trains_states_three_times_the_memory_limit(tmp_path: Path) -> None:
    """RLIMIT_DATA on a process whose weights, gradients and optimizer states lie in files."""
    # glibc keeps freed memory of up to 32 MiB to itself unless it is told to map what is large
    env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536")
    command = [sys.executable, str(Path(__file__).parent / "small_memory.py"), str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert out.returncode == 0, out.stderr[-3000:]
    limit, states, first, second = map(float, out.stdout.split()[-4:])
    assert states >= 3 * limit
    assert second < first


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("home", ["host", "file"])
def test_memory_does_not_rise_with_saves_and_a_load_reads_its_own_part(home: str, tmp_path: Path) -> None:
    """Public cases: host memory that rose with each save, and ranks that read the shards of all others."""
    for early, late, read, own in run_ranks(2, tier_runs.many_saves, home, str(tmp_path), timeout=100):
        assert (
            late - early < own / 2
        )  # a save that stays would make it 8 x own; the allocator of a used process moves by some pages
        assert read < 1.5 * own + (4 << 20)  # whole blocks of 256 KiB
