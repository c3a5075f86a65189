"""The pool that all tests with several ranks stand on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from pool import RankError, run_ranks


def total(rank: int, world: int, start: float, scale: float = 1.0) -> tuple[float, int]:
    value = torch.tensor([start + rank * scale])
    dist.all_reduce(value)
    return value.item(), os.getpid()


def raises(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("lost")
    dist.barrier()


def hangs(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(100)
    dist.barrier()


def dies(rank: int, world: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else dist.barrier()


def environment(rank: int, world: int, name: str) -> Any:
    return os.environ.get(name), torch.get_num_threads()


def test_results_come_in_rank_order_and_processes_are_reused() -> None:
    first = run_ranks(2, total, 1.0)
    second = run_ranks(3, total, 1.0, kwargs={"scale": 2.0})
    assert [v for v, _ in first] == [3.0, 3.0]
    assert [v for v, _ in second] == [9.0] * 3
    assert [pid for _, pid in first] == [pid for _, pid in second][:2]


def test_a_failing_rank_is_named_and_the_next_call_works() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*KeyError: 'lost'") as caught:
        run_ranks(2, raises)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert run_ranks(2, total, 0.0)[0][0] == 1.0


@pytest.mark.filterwarnings("ignore")
def test_hanging_and_dead_ranks_end_the_call_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: no answer within 2 s.*in hangs"):
        run_ranks(2, hangs, timeout=2)
    with pytest.raises(RankError, match="rank 0 of 2: the process ended"):
        run_ranks(2, dies, timeout=20)
    assert time.monotonic() - started < 10


def test_ranks_have_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_TEST_WORD", "here")
    assert run_ranks(2, environment, "PARTITA_TEST_WORD") == [("here", 1)] * 2
