"""Ctrl-C and SIGTERM: all ranks agree on a step, save and leave; nothing is left."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from pool import run_ranks
from programs import number

from partita.plan.plan import Layout
from partita.runtime.mesh import Mesh
from partita.runtime.signals import StopFlag, signal_of

pytestmark = pytest.mark.timeout(90)
INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("signum", "to"), [(INT, "launcher"), (TERM, "launcher"), (TERM, "rank1"), (INT, "rank0"), (TERM, "all")]
)
def test_all_ranks_leave_after_the_same_step(start: Any, signum: int, to: str) -> None:
    program = start("loop", saving=0.5)
    program.at_step(3)
    if to == "launcher":
        os.killpg(program.process.pid, signum)  # what a terminal does
    elif to == "all":
        for pid in [program.process.pid, *(p.pid for p in program.look())]:
            os.kill(pid, signum)  # what a batch system does
    else:
        os.kill(number(program.folder / f"pid{to[-1]}"), signum)
    assert program.status(15) == 128 + signum
    steps = [number(program.folder / f"saved{rank}") for rank in (0, 1)]
    assert steps[0] == steps[1] >= 3
    assert "Traceback" not in program.err + program.out
    assert f"stopped by signal {int(signum)} after step {steps[0]}" in program.err
    assert program.alive() == []


def test_a_second_ctrl_c_ends_at_once(start: Any) -> None:
    program = start("loop", saving=60, grace=60)
    program.at_step(3)
    os.kill(program.process.pid, INT)
    time.sleep(0.5)
    assert program.process.poll() is None
    os.kill(program.process.pid, INT)
    assert program.status(3) == 130
    assert "Traceback" not in program.err
    assert program.alive() == []


def test_ranks_that_take_longer_than_the_grace_are_ended(start: Any) -> None:
    program = start("loop", saving=60, grace=1)
    program.at_step(3)
    os.kill(program.process.pid, TERM)
    assert program.status(10) == 143
    assert "without a new checkpoint: launch.grace=1 seconds were over" in program.err
    assert program.alive() == []


def test_a_failure_while_leaving_is_a_failure(start: Any) -> None:
    program = start("loop", saving="never")
    program.at_step(3)
    os.kill(program.process.pid, TERM)
    assert program.status(15) == 1
    assert "could not convert string to float" in program.err
    assert program.alive() == []


@pytest.mark.parametrize("after", [0.0, 0.1, 0.3])
def test_a_signal_while_ranks_start_is_not_lost(start: Any, after: float) -> None:
    program = start("loop")
    program.until(lambda: (program.folder / "log").exists())
    time.sleep(after)
    os.kill(program.process.pid, TERM)
    assert program.status(20) == 143
    assert "Traceback" not in program.err
    assert program.alive() == []


def stop_on(rank: int, world: int, signals: dict[int, int]) -> list[int]:
    flag = StopFlag()
    mesh = Mesh(Layout(replicate=world), rank, torch.device("cpu"))
    before = flag.agreed(mesh.group(("replicate",)))
    if rank in signals:
        flag.handle(signals[rank])
    return [before, flag.agreed(mesh.group(("replicate",)))]


@pytest.mark.parametrize(
    ("signals", "agreed"),
    [({}, 0), ({1: TERM}, TERM), ({0: INT, 1: INT}, INT), ({0: TERM, 1: INT}, INT), ({0: TERM, 1: TERM}, TERM)],
)
def test_ranks_agree_on_a_signal(signals: dict[int, int], agreed: int) -> None:
    assert run_ranks(2, stop_on, signals) == [[0, agreed]] * 2


def test_a_sum_over_many_ranks_tells_the_signal() -> None:
    flags = [StopFlag() for _ in range(5000)]
    for flag in flags:
        flag.handle(TERM)
    total = sum(flag.local() for flag in flags)
    assert signal_of(total) == TERM
    flags[7].handle(INT)
    assert signal_of(total - 1 + flags[7].local()) == INT
    assert signal_of(0) == 0
