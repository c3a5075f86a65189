"""The W&B plug-in, offline, against the files that the real client writes."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import partita_wandb
from partita.config.job import JobInfo
from partita.errors import ConfigError, PartitaError
from partita.plan.plan import Plan
from partita.plugin.registry import Registry
from partita_wandb import TrackerConfig
from partita_wandb.credentials import effective_mode
from partita_wandb.session import Session

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import itertools

from programs import ROOT, Program, environment

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither key nor settings of the user."""
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def make_run(folder: Path, *, rank: int = 0, sweep: str | None = None, steps: int = 8, **tracker: Any) -> Any:
    """What hooks see of a run."""
    folder.mkdir(exist_ok=True)
    job = JobInfo(folder, folder.name, ("optimizer.lr=0.1",), {"model": "gpt"}, sweep is not None, 0, folder.parent, sweep)
    return SimpleNamespace(
        rank=rank,
        dir=folder,
        name="a run",
        plan=Plan(),
        pictures={},
        registry=Registry.load(),
        config=SimpleNamespace(tracker=TrackerConfig(**tracker), train=SimpleNamespace(steps=steps)),
        spec=SimpleNamespace(job=job, config={"optimizer": {"lr": 0.1}}),
    )


def steps(run: Any, numbers: range) -> None:
    """Make steps whose loss tells the step."""
    for step in numbers:
        partita_wandb.partita_step_end(run=run, metrics={"step": step, "loss": 10.0 - step})


def records(folder: Path) -> Iterator[Any]:
    """Records of all W&B files below a run's folder, oldest first: protobuf in LevelDB's log format (32 KiB blocks) after 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as pb

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, part = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            part += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # full, or last part
                yield pb.Record.FromString(part)
                part = b""


def of_kind(folder: Path, kind: str) -> list[Any]:
    """Records of one kind; W&B's service writes the last ones a moment after `finish` has returned."""
    for _ in range(100):
        found = list(records(folder))
        if found and found[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    return [getattr(r, kind) for r in found if r.WhichOneof("record_type") == kind]


def history(folder: Path) -> list[dict[str, Any]]:
    return [{i.nested_key[0]: json.loads(i.value_json) for i in h.item} for h in of_kind(folder, "history")]


def config(folder: Path) -> dict[str, Any]:
    return {u.key: json.loads(u.value_json) for u in of_kind(folder, "run")[0].config.update}


def test_one_offline_run_with_config_plan_and_axis(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", sweep="lr", tags=["mine"])
    partita_wandb.partita_run_start(run=run)
    steps(run, range(1, 4))
    partita_wandb.partita_evaluate(run=run, metrics={"step": 3, "eval_loss": 0.5})
    run.pictures["map"] = tmp_path / "map.svg"
    run.pictures["map"].write_text("<svg>a map</svg>")
    partita_wandb.partita_run_end(run=run, summary={"status": "done", "loss": 7.0, "checkpoint": None})
    (made,) = of_kind(run.dir, "run")[:1]
    assert (made.project, made.run_group, made.display_name) == ("partita", "lr", "a run")
    assert set(made.tags) == {"mine", "model=gpt"}
    assert made.run_id == json.loads((run.dir / "wandb_id.json").read_text())["id"]
    found = config(run.dir)
    assert found["optimizer"] == {"lr": 0.1}
    assert found["plan"]["precision"]["compute"] == "float32"
    assert found["plugin_versions"]["wandb"].startswith("partita ")
    assert {m.name or m.glob_name: m.step_metric for m in of_kind(run.dir, "metric")} == {"global_step": "", "*": "global_step"}
    points = history(run.dir)
    (page,) = run.dir.glob("wandb/offline-run-*/files/media/html/map*.html")
    assert "map" in points.pop() and "<svg>a map</svg>" in page.read_text()
    assert [(h["global_step"], h.get("loss"), h.get("eval_loss")) for h in points] == [
        (1, 9.0, None),
        (2, 8.0, None),
        (3, 7.0, None),
        (3, None, 0.5),
    ]
    assert [e.exit_code for e in of_kind(run.dir, "exit")] == [0]
    assert not (Path.cwd() / "wandb").exists()


def test_a_resumed_run_goes_on_and_no_point_is_dropped(tmp_path: Path) -> None:
    first = make_run(tmp_path / "run")
    partita_wandb.partita_run_start(run=first)
    steps(first, range(1, 7))
    partita_wandb.partita_failure(run=first, error=ValueError("power cut"))
    time.sleep(1.1)  # W&B names folders by the second
    again = make_run(tmp_path / "run")
    partita_wandb.partita_run_start(run=again)
    steps(again, range(5, 9))
    partita_wandb.partita_run_end(run=again, summary={"status": "done"})
    assert len({r.run_id for r in of_kind(again.dir, "run")}) == 1
    points = history(again.dir)
    assert [p["global_step"] for p in points] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    counter = [p["_step"] for p in points]
    assert all(b > a for a, b in itertools.pairwise(counter)), "W&B drops points whose own step goes back"
    assert [e.exit_code for e in of_kind(again.dir, "exit")] == [1, 0]


def test_other_ranks_and_other_trackers_write_nothing(tmp_path: Path) -> None:
    for number_of, tracker in enumerate(({"rank": 1}, {"name": "none"}, {"mode": "disabled"})):
        run = make_run(tmp_path / str(number_of), **tracker)
        partita_wandb.partita_run_start(run=run)
        steps(run, range(1, 3))
        partita_wandb.partita_run_end(run=run, summary={})
        assert list(run.dir.iterdir()) == []


def test_one_id_for_a_whole_sweep_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    with pytest.raises(ConfigError, match="unset WANDB_RUN_ID"):
        partita_wandb.partita_run_start(run=make_run(tmp_path / "job", sweep="lr"))
    single = make_run(tmp_path / "single")
    partita_wandb.partita_run_start(run=single)
    assert json.loads((single.dir / "wandb_id.json").read_text())["id"] == "abc"


@pytest.mark.parametrize(
    ("asked", "environ", "netrc", "mode"),
    [
        ("auto", {}, "", "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "", "online"),
        ("auto", {}, "machine api.wandb.ai login user password k", "online"),
        ("auto", {}, "machine elsewhere login user password k\ndefault login a password b", "offline"),
        ("auto", {"WANDB_BASE_URL": "https://w.example"}, "machine w.example login user password k", "online"),
        ("auto", {}, "this is no netrc", "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "", "disabled"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "", "offline"),
        ("online", {}, "", "offline"),
        ("offline", {"WANDB_API_KEY": "k"}, "", "offline"),
    ],
)
def test_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, environ: dict[str, str], netrc: str, mode: str
) -> None:
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert effective_mode(asked)[0] == mode


def problems(**tracker: Any) -> list[str]:
    draft = SimpleNamespace(config=SimpleNamespace(tracker=TrackerConfig(**tracker)))
    return [p.key for p in partita_wandb.partita_check(plan=Plan(), draft=draft)]


def test_what_can_not_be_had_is_refused_before_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(mode="onlin") == ["tracker.mode"]
    assert problems(name="somebody_elses", mode="theirs") == [], "other plug-ins bring trackers too"
    assert problems(mode="online", required=True) == ["tracker.mode"]
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert problems(mode="online", required=True) == []


@pytest.mark.parametrize("required", [True, False])
def test_an_unreachable_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, required: bool
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("partita_wandb.strategy.OPENING", 2.0)
    run = make_run(tmp_path / "run", required=required)
    if required:
        with pytest.raises(PartitaError, match=r"tracker.required: W&B can't start \(online\)"):
            partita_wandb.partita_run_start(run=run)
        return
    partita_wandb.partita_run_start(run=run)
    steps(run, range(1, 3))
    partita_wandb.partita_run_end(run=run, summary={})
    assert "W&B: offline instead of online" in caplog.text
    assert [p["global_step"] for p in history(run.dir)] == [1, 2]


def test_training_does_not_wait_for_wandb() -> None:
    class Slow:
        """Opens after a second."""

        summary: dict[str, Any] = {}
        points: list[dict[str, Any]] = []

        ready = threading.Event()

        def __init__(self) -> None:
            assert self.ready.wait(30)

        def log(self, values: dict[str, Any]) -> None:
            self.points.append(values)

        def finish(self, exit_code: int) -> None:
            self.points.append({"exit": exit_code})

    session = Session(Slow)
    for step in range(100):
        session.log({"step": step})  # returns while the tracker is still being opened
    Slow.ready.set()
    session.finish(0, {})
    assert Slow.points == [*({"global_step": step} for step in range(100)), {"exit": 0}]


TINY = [
    "train.steps=500000",
    "train.global_batch=4",
    "train.sample=0",
    "train.eval_at_end=false",
    "model.layers=1",
    "model.width=32",
    "data.sequence=16",
    "data.limit=100000",
    "launch.ranks=2",
    "train.log_every=1",
]


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_whole_run_asks_nothing_and_leaves_no_process(tmp_path: Path, end: str) -> None:
    folder = tmp_path / "run"
    command = [str(ROOT / "scripts" / "train.py"), f"run.dir={folder}", *TINY, f"data.cache={tmp_path / 'cache'}"]
    program = Program(command, folder, environment(NETRC=str(tmp_path / "netrc")))
    try:
        program.until(lambda: "W&B run" in program.out, 90)
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
        time.sleep(0.5)
        assert len(program.look()) >= 3  # two ranks and W&B's service
        if end == "kill":
            ranks = [p for p in program.look() if p.ppid() == program.process.pid]
            os.kill(ranks[0].pid, signal.SIGKILL)
            assert program.status(20) == 1
        else:
            os.kill(program.process.pid, signal.SIGTERM)
            assert program.status(30) == 143
            assert [e.exit_code for e in of_kind(folder, "exit")] == [0]
        assert program.alive(10) == []
        assert "wandb: (1)" not in program.out + program.err
    finally:
        program.end()
