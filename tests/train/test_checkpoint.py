"""What a checkpoint stores, and that any layout reads it: exactly, in part, checked, without pickle."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "distributed"),
    str(Path(__file__).parents[1] / "state"),
]

import engine_runs
import ranks
from pool import run_ranks

from partita.errors import CheckpointError
from partita.state.slices import StateSlice
from partita.train import shards, storage
from partita.train.checkpoint import find_checkpoint, inspect, list_checkpoints, load_slices, read_weights, verify
from partita.train.dcp import PartitaReader

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, ranks.State]:
    """A checkpoint of 3 ranks of odd shapes and dtypes."""
    torch.manual_seed(0)
    state = {
        "model.embed": torch.randn(7, 5),
        "model.scalar": torch.tensor(3.5),
        "model.empty": torch.zeros(0),
        "model.hollow": torch.zeros(3, 0, 2),
        "model.half": torch.randn(2, 3, 4, dtype=torch.bfloat16),
        "optimizer.embed.exp_avg": torch.randn(7, 5),
        "buffer.count": torch.tensor([5, 6], dtype=torch.int64),
    }
    assert ranks.save(ranks.checkpointers(tmp_path, 3), 12, state, {"lr": 0.1}) == [None] * 3
    return tmp_path / "step-00000012", state


def test_all_shapes_and_dtypes_come_back(tmp_path: Path) -> None:
    """Bit for bit, through a save on 2 ranks and a load on 3."""
    state = {f"model.{i}": torch.randn(3, 5).mul(4).to(kind) for i, kind in enumerate(KINDS)}
    ranks.save(ranks.checkpointers(tmp_path, 2), 1, state)
    found = {k: torch.zeros_like(v) for k, v in state.items()}
    for slices in ranks.even(found, 3):
        load_slices(tmp_path, slices)
    for key in state:
        assert torch.equal(found[key].view(torch.uint8), state[key].view(torch.uint8)), key


@st.composite
def _partitions(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), min_size=1, max_size=4))
    total = sum(math.prod(s) for s in shapes)
    cuts = [sorted(draw(st.lists(st.integers(0, total), max_size=4))) for _ in range(2)]
    return shapes, [0, *cuts[0], total], [0, *cuts[1], total]


@given(_partitions())
@settings(max_examples=60, deadline=None)
def test_any_partition_loads_what_any_partition_saved(case: tuple[list[tuple[int, ...]], list[int], list[int]]) -> None:
    """Tensors laid end to end, cut anywhere into 1 to 5 ranks, loaded by another cutting."""
    shapes, before, after = case
    with tempfile.TemporaryDirectory() as name:
        offset, state = 0.0, {}
        for i, shape in enumerate(shapes):
            state[f"model.{i}"] = (torch.arange(math.prod(shape)) + offset).reshape(shape)
            offset += math.prod(shape)
        savers = ranks.checkpointers(Path(name), len(before) - 1)
        for c, slices in zip(savers, ranks.cut(state, before), strict=True):
            c.save(3, slices, {}, {})
        assert ranks.outcomes(savers) == [None] * len(savers)
        found = {k: torch.full_like(v, -1) for k, v in state.items()}
        for slices in ranks.cut(found, after):
            load_slices(name, slices)
        assert all(torch.equal(found[k], state[k]) for k in state)


def test_odd_shapes_are_kept(stored: tuple[Path, ranks.State]) -> None:
    """Scalars, empty tensors and buffers are there under their names, without a process group."""
    path, state = stored
    weights = read_weights(path)
    assert set(weights) == {"embed", "scalar", "empty", "hollow", "half", "count"}
    for key, tensor in state.items():
        if not key.startswith("optimizer"):
            found = weights[key.split(".", 1)[1]]
            assert found.shape == tensor.shape and found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert read_weights(path, torch.bfloat16)["embed"].dtype == torch.bfloat16
    assert read_weights(path, torch.bfloat16)["count"].dtype == torch.int64


def test_only_the_wanted_bytes_are_read(tmp_path: Path) -> None:
    """A quarter of 16 MB costs 4 MB and the rest of two blocks for each shard that it touches, counted by the system, too."""
    state = {"model.x": torch.randn(4000, 1000)}
    ranks.save(ranks.checkpointers(tmp_path, 3), 1, state)
    target = torch.zeros(1_000_000)

    def rchar() -> int:
        return int(Path("/proc/self/io").read_text().split()[1]) if Path("/proc/self/io").exists() else 0

    before = rchar()
    _, report = load_slices(tmp_path, [StateSlice("model.x", (4000, 1000), torch.float32, 1_500_000, 2_500_000, target)])
    assert torch.equal(target, state["model.x"].view(-1)[1_500_000:2_500_000])
    assert 4_000_000 <= report.bytes_read <= 4_000_000 + 4 * shards.BLOCK
    assert rchar() - before <= report.bytes_read + 100_000


def test_extra_values_come_back_as_they_were(tmp_path: Path) -> None:
    """Tuples, bytes, large integers and floats; own values for each rank, and only where as many ranks load."""
    extra = {
        "scale": 1024.0,
        "tracker": 7,
        "state": (1, (2**80, 3), None),
        "tiny": 1e-310,
        "raw": b"\x00\xff",
        "names": ["a", {"b": True}],
    }
    savers = ranks.checkpointers(tmp_path, 2)
    for r, c in enumerate(savers):
        c.save(4, [], extra, {"rng": bytes([r] * 5), "tuple": (r,)})
    assert ranks.outcomes(savers) == [None, None]
    for r, c in enumerate(ranks.checkpointers(tmp_path, 2)):
        assert c.load(tmp_path, []) == (extra, {"rng": bytes([r] * 5), "tuple": (r,)})
    assert ranks.checkpointer(tmp_path).load(tmp_path, []) == (extra, None)


def test_what_is_no_json_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """The error has the place of the value, on the rank that has it and on the others."""
    savers = ranks.checkpointers(tmp_path, 2)
    for r, c in enumerate(savers):
        c.save(1, [], {}, {"rng": {"device": [object() if r else 1]}})
    found = ranks.outcomes(savers)
    assert found[0] == found[1] and "rank_extra of rank 1.rng.device[0] is a object" in str(found[0])
    savers = ranks.checkpointers(tmp_path, 1)
    savers[0].save(1, [], {"a": {3: 1}}, {})
    assert "extra.a: the key 3" in str(ranks.outcomes(savers)[0])
    assert not [n for n in ranks.names(tmp_path) if not n.endswith(".failed")]


def test_dtypes_are_converted_and_reported(tmp_path: Path) -> None:
    """float32 loads into bfloat16 and back by rounding; integers never become floats."""
    ranks.save(
        ranks.checkpointers(tmp_path, 2), 1, {"model.x": torch.tensor([1.0, 1 / 3, 1e-3]), "model.n": torch.tensor([1, 2])}
    )
    half = torch.zeros(3, dtype=torch.bfloat16)
    _, report = load_slices(tmp_path, [StateSlice("model.x", (3,), half.dtype, 0, 3, half)])
    assert torch.equal(half, torch.tensor([1.0, 1 / 3, 1e-3]).bfloat16()) and report.converted == ("model.x",)
    with pytest.raises(CheckpointError, match=r"model\.n: stored as int64, wanted as float32"):
        load_slices(tmp_path, [StateSlice("model.n", (2,), torch.float32, 0, 2, torch.zeros(2))])


def test_what_does_not_fit_is_named(stored: tuple[Path, ranks.State]) -> None:
    """Strict: nothing is loaded and all names are told. Partial: the rest is loaded and what was left is reported."""
    path, state = stored
    good, wrong, absent = torch.zeros(35), torch.full((4,), 9.0), torch.full((2,), 9.0)
    wanted = [
        StateSlice("model.embed", (7, 5), torch.float32, 0, 35, good),
        StateSlice("model.scalar", (4,), torch.float32, 0, 4, wrong),
        StateSlice("model.embd", (2,), torch.float32, 0, 2, absent),
    ]
    with pytest.raises(
        CheckpointError, match=r"(?s)model.scalar: stored as \[\], wanted as \[4\].*missing: model.embd.*nearest.*model.embed"
    ):
        load_slices(path, wanted)
    assert not good.any()
    c = ranks.checkpointer(path.parent)
    c.load(path, wanted, partial=True)
    assert torch.equal(good.view(7, 5), state["model.embed"])
    assert c.report is not None and (c.report.missing, c.report.mismatched) == (("model.embd",), ("model.scalar",))
    assert c.report.loaded == ("model.embed",) and wrong.eq(9).all() and absent.eq(9).all()


def test_every_damaged_byte_is_found(stored: tuple[Path, ranks.State]) -> None:
    """One bit in any file of a checkpoint, or a file cut short or missing, is an error that names the file."""
    path, _ = stored
    assert verify(path) > 0
    for file in path.iterdir():
        whole = file.read_bytes()
        for damaged in (
            whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :],
            whole[:-1],
            None,
        ):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            if file.name == "summary.json":
                assert list_checkpoints(path.parent) == []
            else:
                with pytest.raises(
                    CheckpointError, match=file.name if file.name != "index.json" else "index.json|no complete checkpoint"
                ):
                    verify(path)
            file.write_bytes(whole)
    assert verify(path) > 0


def test_mixed_checkpoints_are_refused(stored: tuple[Path, ranks.State]) -> None:
    """A rank's document from another save, copied into the folder."""
    path, state = stored
    ranks.save(ranks.checkpointers(path.parent, 3), 13, state)
    shutil.copy(path.parent / "step-00000013" / "rank-00001.json", path)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        verify(path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    """A later version, or another program's file."""
    ranks.save(ranks.checkpointers(tmp_path, 1), 1, ranks.full(1, 2))
    path = tmp_path / "step-00000001"
    content = storage.read_sealed(path / "index.json")
    del content["sha256"]
    storage.write_sealed(path / "index.json", {**content, "version": 99})
    with pytest.raises(CheckpointError, match="format version 99; this partita reads version 1"):
        inspect(path)
    storage.write_sealed(path / "index.json", {**content, "format": "other"})
    with pytest.raises(CheckpointError, match="'other'"):
        inspect(path)


def test_nothing_is_unpickled(stored: tuple[Path, ranks.State]) -> None:
    """No pickle in the files, and none asked for while reading them, also through torch.distributed.checkpoint."""
    path, _ = stored
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            with pytest.raises(Exception):  # noqa: B017  what raw numbers are to pickle varies
                pickle.loads(file.read_bytes())
    asked: list[str] = []
    watching = [True]  # a hook can't be taken off again
    sys.addaudithook(lambda event, _: asked.append(event) if watching[0] and event.startswith("pickle.") else None)
    read_weights(path)
    inspect(path)
    ranks.checkpointer(path.parent).load(path, [])
    dcp.load({"model.embed": torch.zeros(7, 5)}, storage_reader=PartitaReader(path), no_dist=True)
    watching[0] = False
    assert asked == []


def test_lists_and_contents(stored: tuple[Path, ranks.State]) -> None:
    """What people and scripts ask of a folder."""
    path, state = stored
    ranks.save(ranks.checkpointers(path.parent, 1), 20, ranks.full(1, 4), score=0.5)
    found = list_checkpoints(path.parent)
    assert [(i.step, i.world, i.score) for i in found] == [(12, 3, None), (20, 1, 0.5)]
    seen = inspect(path)
    assert (seen["step"], seen["world"], seen["extra"]) == (12, 3, {"lr": 0.1})
    assert seen["plan"]["layout"]["replicate"] == 3 and seen["versions"]["torch"] == torch.__version__
    assert seen["tensors"]["model.half"]["dtype"] == "bfloat16" and set(seen["tensors"]) == set(state)


def test_paths_that_people_give(stored: tuple[Path, ranks.State]) -> None:
    """A checkpoint, its folder, a run's folder; errors for what is absent, empty, or unfinished."""
    path, _ = stored
    run = path.parent / "run"
    shutil.copytree(path, run / "checkpoints" / path.name)
    assert find_checkpoint(path) == find_checkpoint(path.parent) == path
    assert find_checkpoint(run) == run / "checkpoints" / path.name
    with pytest.raises(CheckpointError, match="does not exist; beside it are step-00000012"):
        find_checkpoint(path.parent / "step-00000013")
    (path.parent / "void").mkdir()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_checkpoint(path.parent / "void")
    shutil.copytree(path, path.parent / "step-00000014.x-1.tmp")
    with pytest.raises(CheckpointError, match="unfinished"):
        find_checkpoint(path.parent / "step-00000014.x-1.tmp")


# ------------------------------------------------------------------ torch.distributed.checkpoint


def test_torch_distributed_checkpoint_reads_it(stored: tuple[Path, ranks.State]) -> None:
    """Plain tensors, scalars and another dtype, without a process group."""
    path, state = stored
    targets = {k: torch.zeros_like(v) for k, v in state.items() if v.numel()}
    targets["model.half"] = torch.zeros(2, 3, 4)
    dcp.load(targets, storage_reader=PartitaReader(path.parent), no_dist=True)
    for key, tensor in targets.items():
        assert torch.equal(tensor, state[key].to(tensor.dtype)), key
    assert PartitaReader.validate_checkpoint_id(path) and not PartitaReader.validate_checkpoint_id(path.parent)


def dtensors(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    """Load as DTensors cut along two dimensions; returns them whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    targets = {
        "model.embed": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
        "model.half": distribute_tensor(torch.zeros(2, 3, 4, dtype=torch.bfloat16), mesh, [Shard(0)]),
    }
    dcp.load(targets, storage_reader=PartitaReader(folder))
    return {k: v.full_tensor() for k, v in targets.items()}


def test_torch_distributed_checkpoint_reads_dtensors(stored: tuple[Path, ranks.State]) -> None:
    """Two ranks read what three wrote, cut along rows and columns."""
    path, state = stored
    for found in run_ranks(2, dtensors, str(path)):
        assert all(torch.equal(found[k], state[k]) for k in found)


# ------------------------------------------------------------------ the state engine


def train_and_save(rank: int, world: int, placement: str, folder: str, steps: int) -> dict[str, torch.Tensor]:
    """A few updates of the odd model, and a checkpoint; returns all states whole."""
    from partita.train.checkpoint import Checkpointer

    plan = engine_runs.make_plan(world, placement)
    engine = engine_runs.make_engine(rank, plan, "adamw")
    for n in range(steps):
        engine_runs.step(engine, n, 12, rank, 1e-2, 1.0)
    c = Checkpointer(folder, engine.mesh)
    c.save(steps, engine.save_slices(), engine.extra_state(), {"rank": rank})
    c.wait()
    return _whole(engine)


def load_and_train(rank: int, world: int, placement: str, folder: str, more: int) -> tuple[dict[str, torch.Tensor], int, object]:
    """A fresh engine from the checkpoint; returns its states, its count of updates, and its loss in the next step."""
    from partita.train.checkpoint import Checkpointer

    engine = engine_runs.make_engine(rank, engine_runs.make_plan(world, placement), "adamw")
    c = Checkpointer(folder, engine.mesh)
    extra, _ = c.load(folder, engine.load_slices())
    engine.after_load()
    engine.load_extra_state(extra)
    whole, updates = _whole(engine), engine.updates
    return whole, updates, engine_runs.step(engine, more, 12, rank, 1e-2, 1.0)


def _whole(engine) -> dict[str, torch.Tensor]:
    kinds = ("parameter", "exp_avg", "exp_avg_sq")
    trained = {b.name: b.parameter.requires_grad for b in engine.bindings}
    return {f"{n}.{k}": engine.full_tensor(n, k).clone() for n, t in trained.items() for k in kinds if t or k == "parameter"}


@pytest.mark.parametrize(
    ("placement", "other"), [("replicated", "parameters"), ("parameters", "replicated"), ("optimizer", "gradients")]
)
def test_states_survive_another_world_and_placement(placement: str, other: str, tmp_path: Path) -> None:
    """Frozen, tied, empty and scalar parameters and their moments are bit-equal on 1, 2 and 3 ranks; the next loss agrees."""
    saved = run_ranks(2, train_and_save, placement, str(tmp_path), 3)[0]
    losses = []
    for world, kind in ((1, "replicated"), (2, placement), (3, other)):
        for whole, updates, result in run_ranks(world, load_and_train, kind, str(tmp_path), 3):
            assert updates == 3 and whole.keys() == saved.keys()
            assert all(torch.equal(whole[k], saved[k]) for k in saved)
            losses.append(result[0])
    assert max(losses) - min(losses) <= 1e-5 * losses[0]
