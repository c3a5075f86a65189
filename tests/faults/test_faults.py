"""Injected faults are named rightly (the whole table: scripts/bench/faults.py), and what can't be injected is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import commands


def test_faults_are_named() -> None:
    """The quick ones of each family: a hang, a wrong number, a full disk, a bit."""
    done = commands.script("bench/faults.py", "stop", "nonfinite", "flip", "full_disk", "lost_node", "memory")
    assert done.stdout.count("| `") == 6


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("faults.kind=kil",), "did you mean 'kill'"),
        (("+faults=kill", "faults.rank=7"), "no rank 7"),
        (("+faults=kill", "faults.step=0"), "faults.step"),
        (("+faults=unreadable", "faults.step=3"), "train.save_every"),
        (("diagnosis.on_hang=panic",), "report, stop"),
        (("diagnosis.hang_after=0",), "above 0"),
        (("diagnosis.spike=-1",), "diagnosis.spike"),
    ],
    ids=str,
)
def test_what_can_not_be_done_is_refused(overrides: tuple[str, ...], words: str) -> None:
    from partita.config.compose import compose_config, registry_for
    from partita.plan.make import make_plan

    config, _ = compose_config([*commands.TINY, "parallel.data=2", *overrides])
    problems = make_plan(config, registry_for(())).problems
    assert any(words in f"{p.key} {p.reason} {p.remedy}" for p in problems), problems


def test_a_fault_is_in_the_manifest() -> None:
    from partita.config.compose import compose_config, registry_for
    from partita.plan.make import make_plan

    config, _ = compose_config([*commands.TINY, "parallel.data=2", "+faults=kill"])
    lines = [str(e) for e in make_plan(config, registry_for(())).manifest.as_list()]
    assert any("faults.kind" in line and "on purpose at step 5 of rank 0" in line for line in lines)


# ------------------------------------------------------------------ parts of the diagnosis


def test_spikes_by_median_and_deviation() -> None:
    from partita_diagnosis.numbers import Spikes

    spikes = Spikes(12.0)
    assert [spikes.score(3.0 + 0.01 * (i % 5)) for i in range(16)] == [0.0] * 16
    assert spikes.score(3.03) < 2
    # median 3.02, median absolute deviation 0.01
    assert spikes.score(4.0) == pytest.approx(0.6745 * (4.0 - 3.02) / 0.01, rel=0.1)
    assert spikes.score(3.0) < 2  # the spike has not moved the median


def test_a_spike_is_reported_and_can_stop(tmp_path: Path) -> None:
    from partita.errors import PartitaError, RollBack
    from partita_diagnosis.config import DiagnosisConfig
    from partita_diagnosis.numbers import SpikeGuard
    from partita_diagnosis.report import Report

    def guard(policy: str) -> SpikeGuard:
        made = SpikeGuard(DiagnosisConfig(on_spike=policy, roll_backs=1, roll_back_skip=7), Report(tmp_path, 0))
        for i in range(20):
            assert made.veto(i, 3.0 + 0.01 * (i % 5), 1.0) == ""
            made.look(i, 3.0 + 0.01 * (i % 5))
        return made

    with pytest.raises(PartitaError, match="step 20: the loss is 9"):
        guard("stop").look(20, 9.0)
    guard("warn").look(21, 9.0)
    backs = guard("roll_back")
    with pytest.raises(RollBack) as back:
        backs.look(22, 9.0)
    assert back.value.skip == 7
    with pytest.raises(PartitaError, match="after 1 roll-backs"):
        backs.look(22, 9.0)
    assert "robust deviations" in guard("skip").veto(23, 9.0, 1.0)
    assert (tmp_path / "diagnosis.jsonl").read_text().count('"spike"') == 5


def test_skip_and_roll_back_pass_over_the_same_samples(tmp_path: Path) -> None:
    """After a spike at step 25, the update left out and the way back to step 24 lead to the same training, one step apart."""
    common = (
        "parallel.data=2",
        "+diagnosis=on",
        "+faults=spike",
        "faults.step=25",
        "faults.rank=0",
        "lr_schedule=constant",
        "train.steps=30",
    )
    commands.train(tmp_path / "skip", *common, "diagnosis.on_spike=skip")
    lines = commands.metrics(tmp_path / "skip")
    assert [m["step"] for m in lines if "left_out" in m] == [25]
    back = ("diagnosis.on_spike=roll_back", "train.save_every=8", "diagnosis.roll_back_skip=0", "faults.once=false")
    done = commands.train(tmp_path / "back", *common, *back)
    assert "went back to step 24; 1 updates' samples are passed over" in done.stdout + done.stderr
    skipped, returned = commands.column(tmp_path / "skip", "loss"), commands.column(tmp_path / "back", "loss")
    assert returned[:24] == skipped[:24]
    assert returned[24:29] == skipped[25:]
    assert [m["step"] for m in commands.metrics(tmp_path / "back")] == list(range(1, 31))
    refused = commands.train(tmp_path / "no", "+diagnosis=on", "diagnosis.on_spike=roll_back", check=False)
    assert refused.returncode == 2 and "train.save_every" in refused.stderr


def test_out_of_memory_shows_plan_and_measurement_and_three_changes(tmp_path: Path) -> None:
    import json

    import torch

    from partita.config.compose import compose_config, registry_for
    from partita_diagnosis import memory
    from partita_diagnosis.report import Report

    config, _ = compose_config([*commands.TINY, "parallel.data=2", "train.micro_batch=4"])
    engine = SimpleNamespace(allocated=lambda: {"parameters": 7, "gradients": 8, "optimizer": 9})
    device = SimpleNamespace(memory=lambda: 123456, kind="cpu")
    run: Any = SimpleNamespace(config=config, registry=registry_for(()), engine=engine, device=device, rank=1, step=6)
    error = torch.OutOfMemoryError("tried to allocate 20.00 MiB")
    assert memory.is_out_of_memory(error)
    assert not memory.is_out_of_memory(ValueError("no"))
    memory.tell(run, error, Report(tmp_path, 1))
    line = json.loads((tmp_path / "diagnosis.jsonl").read_text())
    assert (line["kind"], line["step"], line["about"]) == ("memory", 7, 1)
    assert len(line["advice"]) == 3
    assert "parameters: planned" in line["cause"] and "measured 7 bytes" in line["cause"] and "peak 123,456" in line["cause"]
    assert line["planned"]["optimizer"] > 0
    # A device that turned out to need 8 times the plan: only what fits with as much more counts.
    total = sum(line["planned"].values())
    run.device = SimpleNamespace(memory=lambda: 8 * total, kind="cuda")
    run.step = 7
    memory.tell(run, error, Report(tmp_path, 1))
    second = json.loads((tmp_path / "diagnosis.jsonl").read_text().splitlines()[1])
    sizes = [int(text.split("(")[1].split()[0].replace(",", "")) for text in second["advice"]]
    assert all(size < 0.95 * total for size in sizes)
    assert memory.asked_bytes("Tried to allocate 20.00 MiB. GPU 0") == 20 << 20
    assert memory.asked_bytes("you tried to allocate 1152921504606846976 bytes. Error code 12") == 1 << 60
    assert memory.asked_bytes("out of memory") == 0


def test_the_watchdog_of_host_memory_saves_and_leaves(tmp_path: Path) -> None:
    done = commands.train(
        tmp_path / "run", "parallel.data=2", "train.steps=100000", "+diagnosis=on", "diagnosis.host_reserve=1.0", check=False
    )
    assert done.returncode == 143
    text = (tmp_path / "run" / "diagnosis.jsonl").read_text()
    assert "before the system kills a rank" in text
    step = commands.metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}"


def test_the_newest_checkpoint_is_read_at_once_and_then_all_in_turn(tmp_path: Path) -> None:
    """One that is damaged after it was read, when it is the newest no more, is found too."""
    from partita_diagnosis.monitor import Monitor

    run = SimpleNamespace(
        config=SimpleNamespace(diagnosis=SimpleNamespace(verify_every=10.0)), checkpoints=SimpleNamespace(dir=tmp_path)
    )
    monitor = Monitor(run, SimpleNamespace(rank=0), SimpleNamespace())  # type: ignore[arg-type]
    for name in ("step-00000001", "step-00000002", "step-00000003.a-1.tmp"):
        (tmp_path / name).mkdir()
    read = []
    for now in (1.0, 2.0, 3.0, 12.0, 21.0, 22.0):
        path = monitor._to_verify(now)
        if path is not None:
            monitor._verified[path] = now
        read.append(path and int(path.name[-1]))
    assert read == [2, None, None, 1, None, 2]


def test_a_watched_run_computes_the_same(tmp_path: Path) -> None:
    """Watching changes no number, and torch's functions are put back."""
    commands.train(tmp_path / "plain", "parallel.data=2", "+strategy=zero3")
    watched = ("+diagnosis=on", "diagnosis.replicas_every=1", "diagnosis.recompute_every=2", "model.dropout=0")
    commands.train(tmp_path / "watched", "parallel.data=2", "+strategy=zero3", *watched)
    assert commands.column(tmp_path / "plain", "loss") == commands.column(tmp_path / "watched", "loss")
    assert not (tmp_path / "watched" / "diagnosis.jsonl").exists()
