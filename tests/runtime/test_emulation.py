"""Nodes that are network namespaces: their links have the rate that was asked for, and nothing is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

import emulated
from pool import run_ranks

from partita.runtime.emulation import Network, unavailable

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(bool(unavailable()), reason=f"no emulated network here: {unavailable()}"),
]
RATE = 40e6  # bytes/s
HEADERS = 1.12  # of TCP and of barriers, on top of what is counted


def test_two_levels_send_between_nodes_what_the_formula_says(tmp_path: Path) -> None:
    """2 nodes of 2 ranks; bytes are those that the kernel has counted on a node's link."""
    with Network(2, RATE) as network:
        namespaces = [network.namespace(node) for node in range(2)]
        got = run_ranks(4, emulated.volumes, str(tmp_path), namespaces)
    part = emulated.N // 4
    scatter = {  # bytes of a node: k - 1 of k parts of each rank's buffer flat; 1 / ranks of a node of that in two levels
        "flat native": 2 * 2 * part * 4,
        "flat int8": 2 * 2 * emulated.packet(part),
        "hierarchical native": 2 * part * 4,
        "hierarchical int8": 2 * emulated.packet(part),
    }
    for rank, measured in enumerate(got):
        for way, least in scatter.items():
            error, reduced, gathered, tallies = measured[way]
            assert error < (0.02 if "int8" in way else 1e-6), way
            assert least <= reduced < HEADERS * least, (way, rank)
            once = 2 * (emulated.packet(part) if "int8" in way else 4 * part)  # in two levels each part crosses once
            assert once <= gathered < HEADERS * (once if "hierarchical" in way else 3 * once), (
                way,
                rank,
            )  # flat: trees of all ranks
            assert set(tallies) == {"gradient_reduce", "parameter_gather"}
        seconds, across = measured["seconds"]
        assert 0.8 * 2 * across / RATE < seconds < 4 * across / RATE  # both ranks of a node share its link


def test_a_killed_program_leaves_neither_processes_nor_links() -> None:
    program = (
        "import sys, time\nfrom partita.runtime.emulation import Network\nwith Network(2, 1e6) as n:\n"
        "    p = n.start(0, ['sleep', '60'], {})\n    print(*(h.pid for h in n._holders), p.pid, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) == 3 and all(psutil.pid_exists(pid) for pid in children)
    process.kill()
    process.communicate()
    end = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in children) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in children)
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("partita")]


def test_ranks_that_fail_end_the_others(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; print('rank', os.environ['RANK']); sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    with Network(2) as network:
        start = time.monotonic()
        ended = network.run([sys.executable, "-c", script], ranks=1, timeout=30)
        assert time.monotonic() - start < 20
        assert [e.status for e in ended] == [-9, 3] and "rank 1" in ended[1].output
        with pytest.raises(TimeoutError, match="not done within 1 s"):
            network.run([sys.executable, "-c", "import time; time.sleep(60)"], ranks=1, timeout=1)
