"""The sweep files make command lines that compose."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from programs import ROOT, environment

from partita.config.compose import compose_config

SWEEPS = ROOT / "scripts" / "sweeps"


def test_the_wandb_agent_makes_a_command_that_composes() -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load((SWEEPS / "wandb.yaml").read_text())
    values = {"optimizer.lr": 0.002, "optimizer.weight_decay": 0.0, "precision": "bf16"}
    assert set(values) == set(sweep["parameters"])
    assert (ROOT / sweep["program"]).is_file()
    macros = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    words: list[str] = []
    for word in create_sweep_command(sweep["command"]):
        macro = re.fullmatch(r"\$\{(\w+)\}", word)
        words += [word] if macro is None else macros.get(macro.group(1), [])
    config, _ = compose_config(words[words.index("${program}") + 1 :] if "${program}" in words else words[1:])
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.train.steps) == (0.002, 0.0, 100)


@pytest.mark.timeout(120)
def test_optuna_searches_for_the_lowest_loss(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    small = "train.steps=2 train.global_batch=2 train.sample=0 train.eval_batches=1 model.layers=1 model.width=16 data.sequence=8"
    more = ["data.limit=50000", f"data.cache={tmp_path / 'cache'}", "tracker=none", "launch.ranks=1", "train.save_at_end=false"]
    command = [
        str(SWEEPS / "optuna.sh"),
        "hydra.sweeper.n_trials=2",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
        *shlex.split(small),
        *more,
    ]
    env = environment(PYTHON=sys.executable, PATH=os.environ["PATH"])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert 1e-4 <= best["best_params"]["optimizer.lr"] <= 1e-2
    assert 0 < best["best_value"] < 10
