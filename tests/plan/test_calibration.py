"""Measured rates: the fit, the file, and what a plan makes of them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from pool import run_ranks

from partita.config.schema import ClusterConfig, LaunchConfig
from partita.errors import ConfigError
from partita.plan.calibration import Calibration, calibration_file, read_calibration, write_calibration
from partita.plan.cluster import find_cluster, this_machine
from partita.runtime.measure import SIZES, fit_link


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("beta", "alpha"), [(1e9, 2e-4), (240e9, 3.4e-6), (20e9, 14e-6)])
def test_fit_recovers_alpha_and_beta(beta, alpha, noise):
    rng, hops = random.Random(0), 4.0
    times = [(hops * alpha + size / beta) * (1 + rng.uniform(-noise, noise)) for size in SIZES]
    found = fit_link(SIZES, times, hops)
    assert found[0] == pytest.approx(beta, rel=0.001 + 5 * noise) and found[1] == pytest.approx(alpha, rel=0.001 + 2 * noise)


def test_noise_never_makes_a_negative_rate():
    bandwidth, latency = fit_link([1e3, 1e6], [2e-3, 1e-3], 2.0)
    assert bandwidth > 0 and latency > 0


def link_between_ranks(rank, world):
    from partita.runtime import measure
    from partita.runtime.device import Device

    device = Device.current()
    plain = measure.measure_link(device, None, world, 2.0)
    buffer = torch.zeros(1 << 20)
    torch.distributed.all_reduce(buffer)
    return plain


def test_ranks_measure_one_link():
    found = run_ranks(2, link_between_ranks, timeout=60)
    assert found[0] == found[1], "the slowest rank's times count on all of them"
    bandwidth, latency = found[0]
    assert 1e6 < bandwidth < 1e12 and 1e-7 < latency < 1.0


@pytest.fixture
def measured():
    return Calibration({"float32": 5e10}, 8e9, 1e-3, (1e9, 2e-4), None, None, 2, "today")


def test_file_round_trip(tmp_path, measured):
    path = tmp_path / "deep" / "rates.json"
    write_calibration(path, "one", measured)
    write_calibration(path, "two", Calibration())
    assert read_calibration(path, "one") == measured
    assert read_calibration(path, "three") is None
    assert sorted(p.name for p in path.parent.iterdir()) == ["rates.json"]


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_file("auto") == tmp_path / "partita" / "calibration.json"
    assert calibration_file("none") is None
    assert calibration_file("/a/b.json") == Path("/a/b.json")


def test_a_plan_for_this_machine_reads_it_and_says_so(tmp_path, measured, plan_of):
    path = tmp_path / "rates.json"
    here = find_cluster(ClusterConfig(calibration="none"), LaunchConfig())
    write_calibration(path, this_machine(here), measured)
    cluster = find_cluster(ClusterConfig(calibration=str(path)), LaunchConfig())
    assert cluster.rates.flops == {"float32": 5e10} and cluster.intra_bandwidth == 1e9 and cluster.rates.measured
    planned = plan_of(cluster__calibration=str(path), launch__ranks=2)
    matrices = next(c for c in planned.costs if c.what == "matrix products")
    flops = planned.model.flops_per_token(32) * 16 * 32
    assert matrices.seconds == pytest.approx(flops / 5e10), "two ranks share what one process reached on all cores"
    described = find_cluster(ClusterConfig(calibration=str(path), device="a100", nodes=1), LaunchConfig())
    assert not described.rates.measured, "a described cluster is another machine"


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"cluster.calibration: .* is no calibration file(.|\n)*scripts/calibrate.py"):
        read_calibration(path, "x")
