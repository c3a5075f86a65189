"""What the shipped config composes to, and the way through the door to plain dataclasses."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from partita.cli import train
from partita.config import command as command_line
from partita.config.command import job_folder, parse_command, parse_overrides, shared_folder, sweep_folder
from partita.config.compose import compose_config, default_choices, hydra_main, registry_for
from partita.config.plain import from_plain, root_type, to_plain
from partita.config.strangers import leaves
from partita.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf" / "partita_conf"


def options() -> Iterator[tuple[str, str]]:
    """(group, option) of everything that is shipped."""
    for path in sorted(CONF.glob("*/*.yaml")):
        yield path.parent.name, path.stem


# What an option needs besides, to be complete.
BESIDES = {
    ("data", "text"): [f"data.path={ROOT}/README.md"],
    ("data", "tokens"): [f"data.path={ROOT}/README.md"],
    ("data", "hf"): [f"data.path={ROOT}"],
    ("data", "sft"): [f"data.path={ROOT}"],
    ("experiment", "smollm2_lora"): [f"model.path={ROOT}", f"data.path={ROOT}"],
    ("model", "hf"): [f"model.path={ROOT}"],
}


@pytest.mark.parametrize(("group", "option"), list(options()), ids=lambda name: name)
def test_each_option_composes(group: str, option: str) -> None:
    plus = "" if group in default_choices() else "+"
    config, info = compose_config([f"{plus}{group}={option}", *BESIDES.get((group, option), [])])
    assert info.choices[group] == option
    assert type(config).__name__ == "Config"


def test_default_choices_are_shipped_and_strategy_is_none_of_them() -> None:
    chosen = default_choices()
    assert set(chosen.items()) <= set(options())
    assert "strategy" not in chosen


def test_yaml_holds_no_defaults_of_the_schema() -> None:
    """Values live in dataclasses: an option file says what makes it different (or names itself)."""
    for path in CONF.glob("*/*.yaml"):
        if path.parent.name in ("experiment", "strategy"):
            continue
        assert len(yaml.safe_load(path.read_text())) <= 6, path


def test_strategies_reach_their_nodes() -> None:
    config, info = compose_config(["+strategy=zero3_offload", "parallel=3d", "precision=bf16", "recompute=full"])
    assert (config.zero.stage, config.offload.optimizer, config.offload.parameters) == (3, "host", "host")
    assert (config.parallel.data, config.parallel.tensor, config.parallel.pipeline) == (2, 2, 2)
    assert (config.precision.name, config.recompute.policy) == ("bf16", "full")
    assert info.overrides == ("+strategy=zero3_offload", "parallel=3d", "precision=bf16", "recompute=full")


def test_command_line_wins_over_strategies() -> None:
    config, _ = compose_config(["+strategy=zero3", "zero.stage=1", "parallel=3d", "parallel.tensor=4"])
    assert (config.zero.stage, config.parallel.tensor) == (1, 4)


def test_types_are_kept() -> None:
    config, _ = compose_config(["optimizer.lr=1", "lr_schedule.warmup=10", "parallel.data=auto", "launch.ranks=2", "run.name=7"])
    assert isinstance(config.optimizer.lr, float)
    assert isinstance(config.lr_schedule.warmup, int)
    assert config.parallel.data == "auto"
    assert config.launch.ranks == 2
    assert config.run.name == "7"
    assert isinstance(compose_config(["lr_schedule.warmup=0.1"])[0].lr_schedule.warmup, float)


def test_nothing_past_the_door_is_omegaconf() -> None:
    config, _ = compose_config(["optimizer.groups=[{match: ['*.bias'], lr_scale: 2}]", "+model.options.a={b: [1, 2]}"])

    def walk(value: object) -> Iterator[object]:
        yield value
        children = vars(value).values() if hasattr(value, "__dict__") else value.values() if isinstance(value, dict) else ()
        for child in [*children, *(value if isinstance(value, list) else ())]:
            yield from walk(child)

    assert not [v for v in walk(config) if type(v).__module__.startswith("omegaconf")]
    assert config.optimizer.groups[0].lr_scale == 2.0
    assert config.model.options == {"a": {"b": [1, 2]}}


def test_plain_round_trip_through_yaml_and_pickle() -> None:
    config, info = compose_config(["optimizer.groups=[{match: ['*.bias'], lr_scale: 2}]", "recompute.patterns=[mlp]"])
    plain = pickle.loads(pickle.dumps(yaml.safe_load(yaml.safe_dump(to_plain(config)))))
    again = from_plain(plain, root_type(registry_for(())))
    assert again == config
    assert type(again.optimizer.groups[0]) is type(config.optimizer.groups[0])
    assert pickle.loads(pickle.dumps(info)) == info


def test_plain_of_another_version_is_refused() -> None:
    config, _ = compose_config()
    with pytest.raises(ConfigError, match=r"stge.*unknown key of ZeroConfig\n.*stage"):
        from_plain(to_plain(config) | {"zero": {"stge": 3}}, root_type(registry_for(())))


def test_every_leaf_can_be_overridden_with_its_own_value() -> None:
    """No key of the schema is out of reach of the command line."""
    config, _ = compose_config()
    texts = []
    for key in leaves(type(config)):
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        if key not in ("run.dir", "plugins.block"):
            texts.append(f"{key}={json.dumps(value)}")
    assert to_plain(compose_config(texts)[0]) | {"run": None} == to_plain(config) | {"run": None}


@pytest.mark.parametrize("name", ["zero", "offload", "recompute", "precision", "compression", "moe", "parallel", "wandb"])
def test_config_composes_without_a_plugin(name: str) -> None:
    config, info = compose_config([f"plugins.block=[{name}]"])
    assert config.plugins.block == [name]
    assert not hasattr(config, "tracker" if name == "wandb" else name)
    assert info.overrides == (f"plugins.block=[{name}]",)


def test_blocked_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_BLOCK_PLUGINS", "zero")
    config, _ = compose_config()
    assert config.plugins.block == ["zero"]


def test_run_folder_is_absolute_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, info = compose_config(["run.dir=here/there"])
    assert config.run.dir == str(tmp_path / "here" / "there") == str(info.dir)
    assert (info.name, info.multirun, info.number) == ("there", False, None)
    assert compose_config(["run.dir=x", "run.name=mine"])[1].name == "mine"
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ the command line


def test_flags_may_stand_anywhere() -> None:
    found = parse_command(["seed=1", "-m", "+strategy=zero1,zero2", "--config-name", "mine", "train.steps=3"])
    assert found.overrides == ("seed=1", "+strategy=zero1,zero2", "train.steps=3")
    assert found.argv() == ["--multirun", "--config-name", "mine", "seed=1", "+strategy=zero1,zero2", "train.steps=3"]


def test_sweep_folder_depends_on_what_is_asked() -> None:
    def folder(*texts: str) -> str:
        return sweep_folder("train", parse_overrides(texts))

    first = folder("optimizer.lr=1e-3,3e-3", "seed=1")
    assert first.startswith("outputs/sweeps/lr_")
    assert first == folder("seed=1", "optimizer.lr=1e-3,3e-3", "run.redo=true")
    assert first != folder("optimizer.lr=1e-3,2e-3", "seed=1")
    assert first != folder("optimizer.lr=1e-3,3e-3", "seed=2")


def test_job_folder_is_a_name_for_any_file_system() -> None:
    assert job_folder(3, "optimizer.lr=0.001,precision=bf16") == "3_optimizer.lr=0.001,precision=bf16"
    assert "/" not in job_folder(0, "data.path=/a/b c*")
    assert len(job_folder(0, "x" * 500)) < 130
    assert job_folder(0, "x" * 500) != job_folder(0, "x" * 499 + "y")
    assert job_folder(2, "") == "2"


def test_ranks_of_torchrun_agree_on_a_folder() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    first = shared_folder(1, environment)
    assert first.startswith("outputs/")
    assert shared_folder(0, environment) == first == shared_folder(1, environment)


def test_ranks_of_slurm_agree_on_a_folder() -> None:
    assert shared_folder(5, {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}) == "outputs/slurm/12-3"


def test_only_rank_0_writes_hydras_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert command_line.joined_rank() == int(rank)
        assert hydra_main(lambda config, info: None, argv=[f"run.dir={tmp_path}/run"]) == 0
        assert (tmp_path / "run" / ".hydra").exists() == (rank == "0")


# ------------------------------------------------------------------ as a command


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_cfg_job_is_the_config_that_is_run(tmp_path: Path) -> None:
    done = run("--cfg", "job", "+strategy=zero3", "train.steps=7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["zero"]["stage"], shown["train"]["steps"]) == (3, 7)
    assert list(tmp_path.iterdir()) == []


def test_help_lists_groups_and_options(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    strategy = next(line for line in lines if line.startswith("strategy: "))
    assert "zero3" in strategy
    assert any(line.startswith("precision: bf16, fp16, fp32") for line in lines)


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("+strategy=zero3", ["+strategy=zero3", "+strategy=zero3_offload"]),
        ("precision=", ["precision=bf16", "precision=fp16", "precision=fp32"]),
        ("zero.st", ["zero.stage="]),
    ],
)
def test_tab_completion(
    line: str, answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"python train.py {line}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", words)
    monkeypatch.setenv("COMP_POINT", str(len(words)))
    monkeypatch.setattr(sys, "argv", ["train.py", "-sc", "query=bash"])
    assert train() == 0
    assert capfd.readouterr().out.split() == answers


def test_no_torch_before_the_job() -> None:
    """Help, completion and refusals stay quick."""
    code = "import sys, partita.cli; from partita.config.compose import compose_config; compose_config(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
