"""Starting ranks, and what a failure of one of them costs: real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(90)


def test_ranks_start_quickly_with_logs_of_their_own(start: Any) -> None:
    program = start("where", fresh=True)
    assert program.status(60) == 0
    summary = json.loads(program.out.splitlines()[-1])
    assert summary["entered"] - summary["started"] < 5  # 0.2 s on a quiet machine
    assert summary["stdin"] == "/dev/null"
    assert not summary["modules"], "a heavy import of torch was made on the way to the first step"
    logs = [(program.folder / "log" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    for rank, text in enumerate(logs):
        assert f"rank {rank} of 2" in text and "started by partita (fork)" in text
        assert f"logged by rank {rank}" in text
    assert "from a subprocess" in logs[1]
    assert program.out.count("from a subprocess") == 1
    assert "logged by rank 0" in program.out and "logged by rank 1" not in program.out


@pytest.mark.parametrize(
    ("how", "rank", "cause", "status"),
    [
        ("raise", 1, "ValueError: the numbers are odd", 1),
        ("raise", 0, "ValueError: the numbers are odd", 1),
        ("refuse", 1, "data.path: there is nothing", 2),
        ("exit", 1, "exit status 7", 1),
        ("zero", 1, "exit status 0", 1),
        ("kill", 0, "SIGKILL", 1),
        ("kill", 1, "SIGKILL", 1),
    ],
)
def test_one_failing_rank_brings_all_down_with_one_message(start: Any, how: str, rank: int, cause: str, status: int) -> None:
    program = start("loop", how=how, rank=rank, at=5)
    program.at_step(4)
    failed = time.monotonic()
    assert program.status(15) == status
    assert time.monotonic() - failed < 15
    message = program.err.splitlines()
    assert message[0].startswith(f"RankFailure: rank {rank} of 2 failed at step 5 (train): ") and cause in message[0]
    assert message[1].strip() == f"log: {program.folder / 'log' / f'rank{rank}.log'}"
    assert len(message) == 2 and "Traceback" not in program.out
    if how in ("raise", "refuse"):
        assert "in _go_wrong" in (program.folder / "log" / f"rank{rank}.log").read_text()
    assert json.loads((program.folder / "log" / "failure.json").read_text())["rank"] == rank
    assert program.alive() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_before_it_has_begun_ends_the_run(start: Any, rank: int) -> None:
    """The other one waits for it in the rendezvous, where no handler of signals runs."""
    program = start("early", rank=rank)
    began = time.monotonic()
    assert program.status(15) == 1
    assert time.monotonic() - began < 15
    assert f"rank {rank} of 2 failed at step 0 (start): its process was ended by SIGKILL" in program.err
    assert program.alive() == []


def test_a_rank_that_is_killed_when_all_is_done_ends_the_run(start: Any) -> None:
    """The other one waits for the launcher to take its result."""
    program = start("late", rank=1, steps=3)
    assert program.status(15) == 1
    assert "rank 1 of 2 failed at step 3 (done): its process was ended by SIGKILL" in program.err
    assert program.alive() == []


def test_ranks_at_different_places_are_named_when_time_is_up(start: Any) -> None:
    program = start("loop", how="lone", rank=0, timeout=3)
    assert program.status(60) == 1
    assert "step 5 (save)" in program.err and "step 5 (train)" in program.err
    assert "not at the same place" in program.err
    assert program.alive() == []


def test_a_hanging_rank_ends_the_run_after_launch_timeout(start: Any) -> None:
    program = start("loop", how="sleep", timeout=3)
    program.at_step(4)
    assert program.status(20) == 1
    assert "Timed out" in program.err
    assert program.alive() == []


def test_jobs_of_one_process_have_ranks_of_their_own(start: Any) -> None:
    program = start("sweep")
    assert program.status(80) == 0
    answer = json.loads(program.out.splitlines()[-1])
    assert answer["results"][0] == answer["results"][2] == 2
    assert answer["results"][1].startswith("rank 1 of 2 failed at step 5 (train): ValueError")
    assert answer["leaked"] == []
    pids = {(program.folder / str(job) / f"pid{rank}").read_text() for job in range(3) for rank in range(2)}
    assert len(pids) == 6


def test_killing_the_launcher_leaves_no_process(start: Any) -> None:
    program = start("loop")
    program.at_step(3)
    assert len(program.look()) == 2
    os.kill(program.process.pid, signal.SIGKILL)
    program.status(5)
    assert program.alive(5) == []
