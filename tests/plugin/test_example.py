"""examples/plugin as a stranger would use it: installed with pip into a fresh environment, listed, used, removed."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from partita.state.optimizers import Update

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
SMALL = [
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "data=synthetic",
    "data.sequence=16",
    "train.global_batch=4",
    "train.steps=4",
    "train.sample=0",
    "launch.threads=1",
]


class Environment:
    """A virtual environment that sees this one's packages and can get more."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder, self.python = folder, folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        here = [p for p in site.getsitepackages() if Path(p).is_dir()]
        # addsitedir also reads the .pth files there, which is where an editable Partita is
        (packages / "outer.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in here))

    def run(self, *arguments: str | Path, status: int = 0, timeout: float = 100) -> str:
        """Standard output of python with these arguments; it must end with `status`."""
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PARTITA_BLOCK_PLUGINS")}
        environment = {**clean, "PYTHONWARNINGS": "ignore", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
        command = [str(self.python), *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == status, f"{command} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout if status == 0 else done.stdout + done.stderr

    def pip(self, *arguments: str | Path) -> str:
        """The outer environment's pip, for this one."""
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments)

    def plugins(self, *arguments: str) -> str:
        """What `partita plugins` prints."""
        return self.run("-c", "import sys; from partita.cli import main; sys.exit(main())", "plugins", *arguments)

    def train(self, *arguments: str, status: int = 0) -> str:
        """A run of scripts/train.py."""
        return self.run(ROOT / "scripts" / "train.py", *arguments, status=status)


def installed(folder: Path) -> Environment:
    """With the example in it, built from a copy so that the build leaves nothing in the tree."""
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    made = Environment(folder / "venv")
    made.pip("install", "--no-deps", "--no-build-isolation", "--no-index", folder / "source")
    shutil.rmtree(folder / "source")
    return made


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Shared by the tests that leave it as it is."""
    return installed(tmp_path_factory.mktemp("example"))


def test_it_is_listed(environment: Environment):
    listing = environment.plugins()
    for word in ("partita-example 0.1.0", "partita_example", "example_lion", "example_parabola", "example_softcap", "gemma2"):
        assert word in listing


def test_blocked_it_is_listed_and_not_used(environment: Environment):
    assert "blocked" in environment.plugins("plugins.block=[example]")
    text = environment.train("plugins.block=[example]", "+strategy=example_softcap", status=2)
    assert "example_softcap" in text


def test_its_strategy_trains(environment: Environment, tmp_path: Path):
    """On one rank and on two, with the same losses."""
    losses = [_trained(environment, ranks, tmp_path / f"run{ranks}") for ranks in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _trained(environment: Environment, ranks: int, folder: Path) -> dict[int, float]:
    """Losses by step of a run with all that the example has, which is checked."""
    environment.train("+strategy=example_softcap", f"launch.ranks={ranks}", f"run.dir={folder}", *SMALL)
    report = [json.loads(line) for line in (folder / "example.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {m["step"]: m["loss"] for m in metrics if "loss" in m}
    assert report[:-1] == [{"step": k, "loss": losses[k], "cap": 30.0} for k in (1, 2, 3, 4)]
    assert report[-1] == {"status": "done", "step": 4}
    assert "example_cap: 30.0" in (folder / "plan.yaml").read_text()
    assert "capped logits" in (folder / "plan.yaml").read_text()
    assert "name: example_lion" in (folder / "config.yaml").read_text()
    rates = [m["lr"] for m in metrics if "lr" in m]
    assert rates == pytest.approx([3e-4 * (0.1 + 0.9 * (1 - (max(k - 1, 0) / 3) ** 2)) for k in (1, 2, 3, 4)])
    return losses


def test_its_mistakes_are_told_with_the_core_s(environment: Environment):
    text = environment.train("+strategy=example_softcap", "example.cap=-1", "zero.stage=7", status=2)
    assert "example.cap" in text and "zero.stage" in text
    text = environment.train("+strategy=example_softcap", "+example.kap=1", status=2)
    assert "example.cap" in text


def test_its_group_alone(environment: Environment):
    shown = environment.train("+example=gemma2", "--cfg", "job", "-p", "example")
    assert "cap: 30.0" in shown and "report_every: 0" in shown


def test_removed_it_is_gone(tmp_path: Path):
    environment = installed(tmp_path)
    assert "example_softcap" in environment.plugins()
    environment.pip("uninstall", "--yes", "partita-example")
    assert "example" not in environment.plugins()
    text = environment.train("+strategy=example_softcap", status=2)
    assert "example_softcap" in text


# ------------------------------------------------------------------ its parts


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages, importable from the tree."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.usefixtures("parts")
def test_lion_is_the_algorithm():
    """Against algorithm 2 of the paper, written out for one vector, over ten updates with a low-precision copy."""
    from partita_example.lion import Lion

    torch.manual_seed(0)
    beta1, beta2, lr, decay = 0.9, 0.99, 0.01, 0.3
    weights, moment = torch.randn(7), torch.zeros(7)
    ranges = [weights[:3].clone(), weights[3:].clone()], [torch.zeros(3), torch.zeros(4)]
    copies = [torch.zeros(3, dtype=torch.bfloat16), None]
    for step in range(1, 11):
        g = torch.randn(7)
        c = beta1 * moment + (1 - beta1) * g
        weights = weights - lr * (c.sign() + decay * weights)
        moment = beta2 * moment + (1 - beta2) * g
        update = Update(ranges[0], [2 * g[:3], 2 * g[3:]], {"exp_avg": ranges[1]}, copies)
        Lion(beta1, beta2).update(update, step=step, lr=lr, weight_decay=decay, scale=torch.tensor(0.5))
    torch.testing.assert_close(torch.cat(ranges[0]), weights)
    torch.testing.assert_close(torch.cat(ranges[1]), moment)
    torch.testing.assert_close(copies[0], ranges[0][0].bfloat16())


@pytest.mark.usefixtures("parts")
def test_softcap_bounds_logits_and_lets_gradients_through():
    from partita_example.softcap import cap_logits

    model = cap_logits(torch.nn.Linear(4, 5), 3.0)
    logits = model(100 * torch.randn(6, 4))
    assert logits.abs().max() <= 3.0
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.usefixtures("parts")
def test_report_after_a_resume_has_each_step_once(tmp_path: Path):
    from types import SimpleNamespace as Names

    from partita_example import partita_run_end, partita_run_start, partita_step_end

    def made(rank: int, step: int) -> Names:
        config = Names(example=Names(report_every=2))
        return Names(rank=rank, dir=tmp_path, step=step, config=config, plan=Names(extensions={}))

    for start, end in ((0, 7), (4, 8)):
        for rank in (0, 1):
            run = made(rank, start)
            partita_run_start(run=run)
            for step in range(start + 1, end + 1):
                partita_step_end(run=run, step=step, metrics={"loss": 1.0})
                run.step = step
            partita_run_end(run=run, summary={"status": "done"})
    steps = [json.loads(line)["step"] for line in (tmp_path / "example.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6, 8, 8]


@pytest.mark.usefixtures("parts")
def test_importing_it_does_not_import_torch():
    code = f"import sys; sys.path.insert(0, {str(EXAMPLE)!r}); import partita_example; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_a_kernel_is_replaced(environment: Environment, tmp_path: Path):
    """Norms in float64: the same training within float32's bound, but not the same bits."""
    losses = {}
    for name, more in (("ours", []), ("example", ["+kernels.replace.norm=example_exact"])):
        environment.train(*SMALL, "kernels.layers=always", f"run.dir={tmp_path / name}", *more)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [line["loss"] for line in map(json.loads, lines) if "loss" in line and "step" in line][:4]
    assert losses["ours"] != losses["example"]
    torch.testing.assert_close(losses["ours"], losses["example"], rtol=1e-5, atol=0)
    assert "example_exact has no 'glu'" in environment.train(*SMALL, "+kernels.replace.glu=example_exact", status=2)
