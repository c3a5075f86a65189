"""Who imports whom, and where files stand (design of the repository, not of any one room)."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("framework", "plugins", "kernels", "conf")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLUGINS = sorted(p.name for p in (ROOT / "plugins").iterdir() if (p / "__init__.py").exists())
LONGEST = 600


def sources(*folders: str) -> Iterator[Path]:
    """Python files of the repository, environments and caches left out."""
    for folder in folders:
        yield from (p for p in sorted((ROOT / folder).rglob("*.py")) if not {".venv", "__pycache__", "build"} & set(p.parts))


def imported(path: Path) -> Iterator[str]:
    """Top-level names that a file imports, also inside functions and by name in a string given to import_module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.split(":")[0].split(".")[0]
            if name.startswith("partita_") and ":" in node.value:
                yield name


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a line of Python by itself."""
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_contract_of_the_import_linter():
    run = python("from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "KEPT" in run.stdout


def test_the_contract_knows_all_packages():
    listed = set(PYPROJECT["tool"]["importlinter"]["root_packages"])
    packages = {p.parent.name for root in SOURCE_ROOTS for p in (ROOT / root).glob("*/__init__.py")}
    assert listed == packages
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    assert {name.strip() for name in layers[0].split("|")} == set(PLUGINS)


def test_the_core_names_no_plugin():
    strangers = {*PLUGINS, "partita_example", "partita_example_conf"}
    core = list(sources("framework", "kernels", "conf"))
    assert not [(p.name, name) for p in core for name in imported(p) if name in strangers]
    assert not [(p.name, name) for p in core for name in strangers if name in p.read_text()]


def test_kernels_stand_on_torch_and_triton_only():
    allowed = {*sys.stdlib_module_names, "torch", "triton", "partita_kernels"}
    assert {(p.name, n) for p in sources("kernels") for n in imported(p) if n not in allowed} == set()


def test_plugins_do_not_import_each_other():
    found = [(str(p.relative_to(ROOT)), n) for p in sources("plugins") for n in imported(p) if n in PLUGINS and n not in p.parts]
    assert not found


def test_every_plugin_has_an_entry_point_and_is_shipped():
    entries = set(PYPROJECT["project"]["entry-points"]["partita"].values())
    assert entries == {"partita.builtin", *PLUGINS}
    shipped = {Path(p).name for p in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert shipped == set(PYPROJECT["tool"]["importlinter"]["root_packages"])


def test_every_plugin_is_built_alike():
    for name in PLUGINS:
        files = {p.name for p in (ROOT / "plugins" / name).glob("*.py")}
        assert {"__init__.py", "config.py", "strategy.py"} <= files, name


@pytest.mark.parametrize("folder", ["framework", "plugins", "kernels", "conf", "scripts", "examples", "tests"])
def test_no_file_is_too_long(folder: str):
    long = {str(p.relative_to(ROOT)): n for p in sources(folder) if (n := len(p.read_text().splitlines())) > LONGEST}
    assert not long


def test_source_roots_are_no_packages():
    assert not [root for root in SOURCE_ROOTS if (ROOT / root / "__init__.py").exists()]
    found = f"[n for n in {SOURCE_ROOTS!r} if (s := u.find_spec(n)) and s.origin]"
    run = python(f"import importlib.util as u; print({found})", Path("/"))
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


def test_nobody_imports_a_source_root():
    everything = sources("framework", "plugins", "kernels", "conf", "scripts", "examples", "tests")
    found = [str(p.relative_to(ROOT)) for p in everything if set(imported(p)) & set(SOURCE_ROOTS) - _installed_namesakes()]
    assert not found


def _installed_namesakes() -> set[str]:
    """Real packages of these names (Hugging Face has one called `kernels`)."""
    return {n for n in SOURCE_ROOTS if (s := importlib.util.find_spec(n)) and s.origin and str(ROOT) not in s.origin}


def test_plugins_load_without_torch():
    """Help and completion load all plug-ins, and must not wait for torch."""
    loaded = "import sys; from partita.plugin.registry import Registry; Registry.load()"
    run = python(f"{loaded}; print([m for m in ('torch', 'wandb') if m in sys.modules])")
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
