"""Ranks that torchrun or Slurm started: we join, and never spawn as well."""

from __future__ import annotations

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import psutil
import pytest
from programs import ROOT, TOYS, Program, environment
from torch.distributed import HashStore

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import commands

from partita.errors import ConfigError
from partita.runtime.joining import adopt, check_joined, hosts, joined
from partita.runtime.meeting import agree_on_start

pytestmark = pytest.mark.timeout(90)


def torchrun(folder: Path, ranks: int, *arguments: str) -> Program:
    head = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return Program([*head, str(TOYS), arguments[0], str(folder), *arguments[1:]], folder)


def test_torchrun_starts_the_ranks_and_we_join(tmp_path: Path) -> None:
    program = torchrun(tmp_path / "run", 2, "loop", "steps=3")
    try:
        assert program.status(60) == 0
        assert json.loads(program.out.splitlines()[-1])["world"] == 2
        assert program.out.count("hello from rank") == 1  # rank 1 has a file
        for rank in (0, 1):
            log = (program.folder / "log" / f"rank{rank}.log").read_text()
            assert "started by torchrun" in log and f"hello from rank {rank}" in log
    finally:
        program.end()


def test_a_failure_under_torchrun_is_told_once(tmp_path: Path) -> None:
    program = torchrun(tmp_path / "run", 2, "loop", "how=raise", "rank=1")
    try:
        assert program.status(60) == 1
        ours = [line for line in (program.out + program.err).splitlines() if line.startswith("RankFailure")]
        assert ours == ["RankFailure: rank 1 of 2 failed at step 5 (train): ValueError: the numbers are odd"]
        assert program.alive() == []
    finally:
        program.end()


def test_a_start_finds_its_own_part_of_a_store_that_outlived_others() -> None:
    """Three starts of three ranks, with a store that keeps all they have said; in the second one, rank 2 was killed half-way."""
    store, names = HashStore(), []
    for start in range(3):
        if start == 1:
            store.set("question/2", "of a rank that is gone")
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda rank: agree_on_start(store, rank, 3, 20.0), (2, 1, 0)))
        assert len(set(found)) == 1
        names.append(found[0])
    assert len(set(names)) == 3
    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not come"):
        agree_on_start(HashStore(), 0, 2, 0.1)


@pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="many imports: PARTITA_LONG_TESTS=1 runs it")
@pytest.mark.timeout(300)
def test_torchrun_starts_again_and_the_run_goes_on_from_memory(tmp_path: Path) -> None:
    """A rank is killed; nothing is on the disk. The losses are those of a run that nobody disturbed, and no memory is left."""
    (tmp_path / "memory").mkdir()
    run = (*commands.TINY, "train.steps=20", "+strategy=zero2", "parallel.data=2", "lr_schedule=constant")
    kill = ("+faults=kill", "faults.rank=1", "faults.step=12", "train.memory_every=2", f"train.memory_path={tmp_path}/memory")
    head = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = str(ROOT / "scripts" / "train.py")
    program = Program([*head, script, f"run.dir={tmp_path}/run", *run, *kill, "train.save_every=0"], tmp_path / "out")
    try:
        assert program.status(240) == 0, program.err[-3000:]
    finally:
        program.end()
    assert f"resumed from {tmp_path}/memory/partita_memory_" in program.out
    commands.train(tmp_path / "whole", *run)
    assert commands.column(tmp_path / "run", "loss") == commands.column(tmp_path / "whole", "loss")
    assert os.listdir(tmp_path / "memory") == []


def test_slurm_starts_the_ranks_and_we_join(tmp_path: Path) -> None:
    """What srun sets, without srun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"}
    tasks = []
    for task in ("0", "1"):
        env = environment(SLURM_PROCID=task, SLURM_LOCALID=task, MASTER_PORT=str(port), **step)
        command = [str(TOYS), "loop", str(tmp_path), "steps=3", "ranks=2"]
        tasks.append(forked.start(command, out=tmp_path / f"task{task}.out", err=tmp_path / f"task{task}.err", env=env))
    try:
        statuses = [task.wait(timeout=60) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert statuses == [0, 0], [(tmp_path / f"task{task}.err").read_text() for task in "01"]
    assert json.loads((tmp_path / "task0.out").read_text().splitlines()[-1])["world"] == 2
    assert "started by slurm" in (tmp_path / "log" / "rank1.log").read_text()
    assert not [t.pid for t in tasks if psutil.pid_exists(t.pid)]


CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "environment"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script without srun
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun of one task: we start the ranks
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, "slurm"),
    ],
)
def test_who_started_us(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], who: str | None) -> None:
    for name in [n for n in os.environ if n in CLEAN or n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert joined() == who


def test_slurm_variables_become_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n in CLEAN or n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    wanted = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu07"}
    slurm = {"PROCID": "5", "LOCALID": "1", "STEP_NUM_TASKS": "8", "STEP_NODELIST": "gpu[07,9]", "JOB_ID": "12", "STEP_ID": "3"}
    environ: dict[str, str] = {f"SLURM_{name}": value for name, value in slurm.items()}
    monkeypatch.setattr(os, "environ", environ)
    adopt()
    assert {name: environ[name] for name in wanted} == wanted
    assert 20000 <= int(environ["MASTER_PORT"]) < 32000


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("localhost", ["localhost"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[08-10,3]", ["gpu08", "gpu09", "gpu10", "gpu3"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert hosts(text) == names


@pytest.mark.parametrize(
    ("world", "multirun", "words"),
    [("4", False, "started 4 processes, and the plan is for 2 ranks"), ("2", True, "-m (multirun) can't run under torchrun")],
)
def test_what_can_not_be_joined_is_refused(monkeypatch: pytest.MonkeyPatch, world: str, multirun: bool, words: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError) as refused:
        check_joined("torchrun", 2, multirun)
    assert words in str(refused.value) and "->" in str(refused.value)


def test_a_plan_for_other_ranks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """What torchrun sets, without torchrun."""
    env = environment(TORCHELASTIC_RUN_ID="x", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    program = Program([str(TOYS), "loop", str(tmp_path / "run"), "steps=3", "ranks=4"], tmp_path / "run", env)
    try:
        assert program.status(60) == 2
        assert "torchrun started 2 processes, and the plan is for 4 ranks" in program.err
    finally:
        program.end()
