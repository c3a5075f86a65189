"""Kinds of mistakes in a config or on a command line: each costs one screen, names its key, and tells the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from partita.config.compose import hydra_main
from partita.errors import EXIT_CONFIG

ROOT = Path(__file__).parents[2]


class Mistake(NamedTuple):
    """argv: what was typed. key: what the message must start with. says: reason and remedy, in parts."""

    name: str
    argv: list[str]
    key: str
    says: list[str]
    environment: dict[str, str] = {}


TABLE = [
    Mistake("mistyped key", ["zero.stge=3"], "zero.stge", ["unknown config key", "zero.stage"]),
    Mistake("mistyped key of a core node", ["train.stpes=3"], "train.stpes", ["unknown config key", "train.steps"]),
    Mistake("key without its node", ["lr=1e-3"], "lr", ["optimizer.lr"]),
    Mistake("mistyped group", ["optim=adam"], "optim", ["optimizer=adam"]),
    Mistake("mistyped root key", ["sede=1"], "sede", ["unknown config key", "seed"]),
    Mistake("mistyped option", ["zero=stge3"], "zero", ["no option 'stge3'", "zero=stage3", "Options of zero"]),
    Mistake("mistyped strategy", ["+strategy=zero33"], "strategy", ["no option 'zero33'", "+strategy=zero3"]),
    Mistake("mistyped strategy in a list", ["+strategy=[zero1,zreo2]"], "strategy", ["no option 'zreo2'", "zero2"]),
    Mistake("stray root key behind a plus", ["+stratgy=zero3"], "stratgy", ["+strategy=zero3"]),
    Mistake("stray nested key behind a plus", ["+zero.stge=3"], "zero.stge", ["unknown config key", "zero.stage"]),
    Mistake("stray key behind two pluses", ["++train.stepz=3"], "train.stepz", ["train.steps"]),
    Mistake("key in a group that is none", ["optimizer/foo=1"], "optimizer/foo", ["no such config group", "optimizer"]),
    Mistake("strategy without a plus", ["strategy=zero3"], "strategy", ["+strategy=zero3"]),
    Mistake(
        "two strategies as two overrides", ["+strategy=ddp", "+strategy=zero2"], "strategy", ["two options", "+strategy=[a,b]"]
    ),
    Mistake("no option of a group", ["zero=null"], "zero", ["no option is given", "Options of zero"]),
    Mistake("no strategy", ["+strategy=null"], "strategy", ["no option is given", "Options of strategy"]),
    Mistake("no option of Hydra's groups", ["hydra/job_logging=null"], "hydra/job_logging", ["no option is given", "name one"]),
    Mistake("strategies that contradict", ["+strategy=[zero1,zero2]"], "strategy", ["zero=stage1", "zero=stage2", "say which"]),
    Mistake("plus before a group with a choice", ["+zero=stage1"], "zero", ["zero=default", "zero=stage1", "without the +"]),
    Mistake("plus before a key that is there", ["+train.steps=5"], "train.steps", ["in the config already", "train.steps=5"]),
    Mistake("text for a number", ["optimizer.lr=fast"], "optimizer.lr", ["'fast' is not a number", "default: 0.001"]),
    Mistake("share for a count", ["train.steps=1.5"], "train.steps", ["'1.5' is not a whole number", "default: 100"]),
    Mistake("text for a switch", ["train.async_save=maybe"], "train.async_save", ["not true or false", "default: true"]),
    Mistake(
        "parentheses for a list", ["optimizer.betas=(0.9,0.95)"], "optimizer.betas", ["not how a list is written", "[0.9,0.95]"]
    ),
    Mistake("one value for a list", ["optimizer.betas=0.9"], "optimizer.betas", ["not a list", "[0.9,0.95]"]),
    Mistake("list that is not closed", ["optimizer.betas=[0.9,0.95"], "optimizer.betas", ["not closed", "quote it"]),
    Mistake("wrong number of betas", ["optimizer.betas=[0.9]"], "optimizer.betas", ["not two decay rates", "[0.9,0.95]"]),
    Mistake("empty value", ["optimizer.lr="], "optimizer.lr", ["no value is given", "a number", "0.001"]),
    Mistake("no value at all", ["train.steps"], "train.steps", ["needs a value", "train.steps=<value>"]),
    Mistake("a word for a whole node", ["run=fast"], "run", ["whole node", "run.dir"]),
    Mistake("several values without -m", ["optimizer.lr=1e-3,3e-3"], "optimizer.lr", ["several values", "-m"]),
    Mistake("negative count", ["train.steps=-5"], "train.steps", ["-5 is less than 1", "at least 1"]),
    Mistake("negative rate", ["optimizer.lr=-0.1"], "optimizer.lr", ["-0.1 is not a number of at least 0"]),
    Mistake("probability above 1", ["model.dropout=1.5"], "model.dropout", ["1.5 is no share", "from 0 to 1"]),
    Mistake("not a number", ["optimizer.lr=nan"], "optimizer.lr", ["nan is not a number"]),
    Mistake("heads that don't divide the width", ["model.heads=7"], "model.heads", ["model.width=256", "4, 8"]),
    Mistake(
        "name that no plug-in provides", ["optimizer.name=adamm"], "optimizer.name", ["provides the optimizer 'adamm'", "adamw"]
    ),
    Mistake("word that is not a choice", ["train.on_nonfinite=halt"], "train.on_nonfinite", ["not a choice", "skip, stop"]),
    Mistake("neither a count nor auto", ["launch.ranks=two"], "launch.ranks", ["neither a count nor auto"]),
    Mistake("data that needs a path", ["data=text"], "data.path", ["needs text files", "data.path=<path>"]),
    Mistake(
        "file that is not there", ["data=text", "data.path=/nowhere/*.txt"], "data.path", ["'/nowhere/*.txt' matches no file"]
    ),
    Mistake("model folder that is not there", ["model=hf", "model.path=/nowhere"], "model.path", ["'/nowhere' does not exist"]),
    Mistake("checkpoint that is not there", ["train.resume=nevr"], "train.resume", ["neither auto nor never", "never"]),
    Mistake("warm-up longer than the run", ["lr_schedule.warmup=200"], "lr_schedule.warmup", ["200 steps", "train.steps=100"]),
    Mistake(
        "interpolation of an unknown key",
        ["optimizer.eps=${optimizer.lrr}"],
        "optimizer.eps",
        ["'optimizer.lrr' not found", "optimizer.lr"],
    ),
    Mistake(
        "interpolation by an unknown resolver", ["run.name=${nope:x}"], "run.name", ["Unsupported interpolation type", "${name:"]
    ),
    Mistake("interpolation that can't be read", ["run.name=${run.dir"], "run.name", ["can't be read", "quote"]),
    Mistake("key taken out", ["~zero.stage"], "zero.stage", ["can't be removed"]),
    Mistake("unknown group taken out", ["~zreo"], "zreo", ["zero"]),
    Mistake("unknown key of Hydra's node", ["hydra.swep.dir=x"], "hydra.swep", ["Hydra's own node"]),
    Mistake("flag that is none", ["--lr", "3"], "--lr", ["no such flag", "optimizer.lr=<value>"]),
    Mistake("flag with a wrong value", ["--cfg", "jobb"], "--cfg", ["'jobb'", "job"]),
    Mistake("flags that exclude each other", ["-m", "--cfg", "job"], "--multirun --cfg", ["exclude each other"]),
    Mistake("config folder that is not there", ["--config-dir", "/nowhere"], "--config-dir", ["'/nowhere' does not exist"]),
    Mistake("primary config that is not there", ["--config-name", "mine"], "config", ["primary config 'mine'", "--config-dir"]),
    Mistake("unknown plug-in blocked", ["plugins.block=[zreo]"], "plugins.block", ["'zreo' is installed", "'zero'"]),
    Mistake("core blocked", ["plugins.block=[core]"], "plugins.block", ["'core'", "nothing runs without it"]),
    Mistake("key of a blocked plug-in", ["plugins.block=[zero]", "zero.stage=3"], "zero.stage", ["unknown config key"]),
    Mistake(
        "group of a blocked plug-in",
        ["plugins.block=[zero]", "zero=stage3"],
        "zero",
        ["blocked or not installed", "plugins.block"],
    ),
    Mistake("strategy of a blocked plug-in", ["plugins.block=[zero]", "+strategy=zero3"], "strategy", ["zero=stage3", "blocked"]),
    Mistake("wrong option in a sweep", ["-m", "zero=stage1,stge2"], "zero", ["no option 'stge2'", "zero=stage2"]),
    Mistake("wrong value in a sweep", ["-m", "optimizer.lr=1e-3,fast"], "optimizer.lr", ["'fast' is not a number"]),
    Mistake("folder swept", ["-m", "run.dir=a,b"], "run.dir", ["a sweep has one folder"]),
    Mistake("sweep under torchrun", ["-m", "seed=1,2"], "--multirun", ["torchrun or Slurm"], {"RANK": "0", "WORLD_SIZE": "2"}),
    Mistake(
        "no common folder under a launcher", ["seed=1"], "run.dir", ["agree on one folder"], {"RANK": "0", "WORLD_SIZE": "2"}
    ),
    Mistake("DeepSpeed config", ["deepspeed=ds.json"], "deepspeed", ["DeepSpeed"]),
]


def never(config: object, info: object) -> None:
    raise AssertionError("the job must not start")


def check_text(mistake: Mistake, text: str) -> None:
    """What every message must be."""
    lines = text.splitlines()
    assert "Traceback" not in text
    assert len(lines) <= 25, text
    assert all(len(line) < 420 for line in lines)
    assert lines[0].startswith("partita: ")
    assert any(line.startswith(mistake.key) for line in lines), text
    assert any(line.lstrip().startswith("->") for line in lines), text
    for part in mistake.says:
        assert part in text, f"{part!r} is not in:\n{text}"


@pytest.mark.parametrize("mistake", TABLE, ids=lambda m: m.name.replace(" ", "-"))
def test_mistake(mistake: Mistake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in mistake.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    status = hydra_main(never, argv=mistake.argv)
    out, err = capsys.readouterr()
    assert status == EXIT_CONFIG, out + err
    check_text(mistake, err)


@pytest.mark.parametrize(("script", "name"), [("train", "flag that is none"), ("plan", "heads that don't divide the width")])
def test_mistake_as_a_command(script: str, name: str, tmp_path: Path) -> None:
    mistake = next(m for m in TABLE if m.name == name)
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *mistake.argv]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | mistake.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert done.stdout == ""
    check_text(mistake, done.stderr)


def test_all_mistakes_are_told_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = ["+stratgy=zero3", "model.widht=8", "optimizer.lr=fast", "precision=b16", "train.steps=-4", "train.keep=0"]
    assert hydra_main(never, argv=wrong) == EXIT_CONFIG
    text = capsys.readouterr().err
    for number, key in enumerate(["stratgy", "model.widht", "optimizer.lr", "precision", "train.steps", "train.keep"], 1):
        assert f"{key}: " in text
        assert f"{number}. " in text


def test_all_wrong_values_are_told_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hydra_main(never, argv=["model.heads=7", "train.global_batch=0", "data.mask=2", "data=text"]) == EXIT_CONFIG
    text = capsys.readouterr().err
    assert all(key in text for key in ("model.heads: ", "train.global_batch: ", "data.mask: ", "data.path: "))


def test_a_hundred_mistakes_fit_on_a_screen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hydra_main(never, argv=[f"train.wrong{i}=1" for i in range(100)]) == EXIT_CONFIG
    text = capsys.readouterr().err
    assert len(text.splitlines()) <= 25
    assert "more" in text.splitlines()[-1]


def test_mistake_in_a_file_of_the_user(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("# @package _global_\nofload:\n  optimizer: host\n")
    assert hydra_main(never, argv=["--config-dir", ".", "+strategy=mine"]) == EXIT_CONFIG
    text = capsys.readouterr().err
    assert "strategy/mine" in text
    assert "ofload" in text
    assert "offload" in text
    assert "Traceback" not in text


def test_wrong_type_in_a_file_of_the_user(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("# @package _global_\ntrain:\n  steps: many\n")
    assert hydra_main(never, argv=["--config-dir", ".", "+strategy=mine"]) == EXIT_CONFIG
    text = capsys.readouterr().err
    assert "train.steps" in text
    assert "'many'" in text
    assert "strategy/mine" in text
