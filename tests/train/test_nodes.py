"""Whole runs over emulated nodes, which torchrun's variables describe. Long: PARTITA_LONG_TESTS=1 runs them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from partita.runtime.emulation import LINK, Network, unavailable

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="several whole runs: PARTITA_LONG_TESTS=1 runs them"),
    pytest.mark.skipif(bool(unavailable()), reason=f"no emulated network here: {unavailable()}"),
]
RATE = 30e6  # bytes/s of a node's link
TINY = (
    "model.layers=3", "model.width=48", "model.heads=4", "data=synthetic", "data.sequence=32", "train.global_batch=12", "train.steps=8",
    "lr_schedule=constant", "tracker=none", "train.sample=0", "train.eval_at_end=false", "train.save_at_end=false", "launch.threads=1",
)  # fmt: skip


def _command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "train.py"), f"run.dir={folder}", *TINY, *overrides]


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _run(network: Network, folder: Path, ranks: int, *overrides: str) -> list[float]:
    ended = network.run(_command(folder, *overrides), ranks, timeout=150)
    assert [e.status for e in ended] == [0] * len(ended), ended[0].output[-3000:]
    return _losses(folder)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_six_ranks_of_two_nodes_train_as_one_rank_does(tmp_path: Path, stage: int) -> None:
    """3 ranks in a node: no power of two. Two levels change no number beyond rounding, int8 little."""
    with Network(1) as alone:
        want = _run(alone, tmp_path / "one", 1)
    with Network(2, RATE) as network:
        base = (f"zero.stage={stage}", "compression.algorithm=hierarchical", "train.communication_log=true")
        native = _run(network, tmp_path / "native", 3, *base)
        before = network.sent(0)
        packed = _run(network, tmp_path / "int8", 3, *base, "compression.gradient_reduce=int8")
        assert network.sent(0) - before < before  # of the run before it
    assert native == pytest.approx(want, rel=1e-5)
    assert packed == pytest.approx(want, rel=1e-2)
    assert (tmp_path / "native" / "communication.svg").exists()
    plan = (tmp_path / "int8" / "plan.yaml").read_text()
    assert "hierarchical" in plan and "node_ranks: 3" in plan


def test_a_network_that_is_cut_ends_all_ranks_with_a_message(tmp_path: Path) -> None:
    """No hang: the time-out of collectives is the limit, and the message names what was waited for."""
    with Network(2, RATE) as network:
        overrides = ("zero.stage=2", "compression.algorithm=hierarchical", "train.steps=100000", "launch.timeout=8")
        log = (tmp_path / "output").open("w+")
        processes = []
        for rank in range(4):
            variables = network.environment(rank // 2, rank % 2, 2)
            processes.append(network.start(rank // 2, _command(tmp_path / "run", *overrides), variables, log.fileno()))
        end = time.monotonic() + 100
        while not (tmp_path / "run" / "metrics.jsonl").exists() or len(_losses(tmp_path / "run")) < 3:
            assert time.monotonic() < end, "training did not begin"
            time.sleep(0.2)
        network._in(1, "ip", "link", "set", LINK, "down")
        end = time.monotonic() + 60
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            time.sleep(0.2)
        assert all(p.returncode not in (None, 0) for p in processes)
        log.seek(0)
        output = log.read()
    assert "waited in vain for the" in output, output[-3000:]
