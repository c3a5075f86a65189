"""Positions, logs, devices and random numbers."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from pool import run_ranks

from partita.errors import ConfigError
from partita.runtime import failure, phase
from partita.runtime.device import Device
from partita.runtime.logs import _Tee
from partita.runtime.phase import Board, Position
from partita.runtime.rng import get_rng_state, name_generator, set_rng_state


def take_place(rank: int, world: int, board: str) -> None:
    phase.share(Path(board), rank)
    phase.set(step=10 + rank, phase="evaluate")
    phase._shared = None  # the process goes on to serve other tests


def test_positions_outlive_their_ranks(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 3)
    run_ranks(2, take_place, str(board.path))
    assert [str(p) for p in board.all()] == ["step 10 (evaluate)", "step 11 (evaluate)", "step 0 (start)"]
    assert board[0].pid > 0 and board[2].pid == 0


def test_a_tee_keeps_what_a_terminal_shows_in_the_end() -> None:
    console, file = io.StringIO(), io.StringIO()
    tee = _Tee(console, file)
    for text in ("plain\n", "10 %", "\r\x1b[2K20 %", "\r\x1b[2K\x1b[1mdone\x1b[0m\n", "windows\r\n", "open end"):
        tee.write(text)
    assert file.getvalue() == "plain\ndone\nwindows\n"
    assert console.getvalue().startswith("plain\n10 %\r\x1b[2K20 %")


def report(run: Path, rank: int, error: Exception) -> failure.Failure:
    failure.folder(run).mkdir(exist_ok=True)
    return failure.report(run, rank, error)


def test_the_cause_counts_and_not_its_echo(tmp_path: Path) -> None:
    echo = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection reset by peer")
    assert report(tmp_path, 0, echo).echo
    assert not (tmp_path / "log" / "failure.json").exists()
    report(tmp_path, 2, ConfigError("data.path: no such file"))
    report(tmp_path, 1, ValueError("later"))
    judged = failure.judge(tmp_path, 3, {0: 1, 2: 1}, [Position()] * 3)
    assert str(judged).startswith("rank 2 of 3 failed at step 0 (start): data.path: no such file")
    assert (judged.rank, judged.exit_status) == (2, 2)
    assert json.loads((tmp_path / "log" / "failure.json").read_text())["rank"] == 2


def test_a_rank_without_a_word_counts_more_than_an_echo(tmp_path: Path) -> None:
    report(tmp_path, 0, RuntimeError("NCCL error: remote process exited"))
    judged = failure.judge(tmp_path, 2, {1: -11, 0: 1}, [Position(3, "train"), Position(4, "save")])
    assert "rank 1 of 2 failed at step 4 (save): its process was ended by SIGSEGV" in str(judged)


def test_generators_depend_on_seed_and_name_only() -> None:
    def draw(seed: int, name: str) -> list[float]:
        return torch.rand(3, generator=name_generator(seed, name)).tolist()

    assert draw(1, "a.weight") == draw(1, "a.weight")
    assert len({tuple(draw(s, n)) for s in (0, 1, 2**40) for n in ("a.weight", "b.weight")}) == 6
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw(1, "a")
    assert torch.equal(before, torch.get_rng_state())


def test_random_numbers_go_on_after_a_resume() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), *torch.rand(2).tolist()]

    draw()
    state = json.loads(json.dumps(get_rng_state()))
    expected = draw()
    draw()
    set_rng_state(state)
    assert draw() == expected


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without accelerators")
def test_the_cpu_is_a_device() -> None:
    device = Device.current()
    assert (device.kind, device.backend, device.name, Device.count()) == ("cpu", "gloo", "cpu", 0)
    assert device.torch_device == torch.device("cpu")
    assert 2**20 < device.memory() < 2**40
    assert device.memory_stats() == {} and device.peak_flops("bfloat16") is None
    device.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_is_a_device() -> None:
    device = Device.current()
    x = torch.ones(2**20, device=device.torch_device)
    device.synchronize()
    assert device.memory() >= x.numel() * 4
    assert device.backend != "gloo" and Device.count() >= 1 and device.name
    state = get_rng_state()
    first = torch.rand(3, device=device.torch_device)
    set_rng_state(json.loads(json.dumps(state)))
    assert torch.equal(first, torch.rand(3, device=device.torch_device))


def test_a_lost_peer_is_an_echo_in_whatever_words() -> None:
    """What counts is why the other rank went; a rank that runs into a time-out may itself be the cause."""
    from partita.errors import PartitaError
    from partita.runtime.failure import _is_echo

    def told(reason: str) -> PartitaError:
        error = PartitaError("rank 2 waited in vain")
        error.__cause__ = RuntimeError(reason)
        return error

    assert _is_echo(RuntimeError("gloo: Connection closed by peer"))
    assert _is_echo(told("[pair.cc:553] Connection closed by peer"))
    assert not _is_echo(told("Timed out waiting 60000ms for recv operation"))
    assert not _is_echo(PartitaError("the data differ"))
