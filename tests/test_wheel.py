"""The wheel holds what the tree holds, and nothing else."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("framework", "plugins", "kernels", "conf")
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "outputs", "multirun", "wandb", "dist", "build", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of what a clone has, without network and without isolation."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in (*SOURCE_ROOTS, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=IGNORED)
        else:
            shutil.copy(source, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    (made,) = folder.glob("partita-*.whl")
    return zipfile.ZipFile(made)


def in_wheel(wheel: zipfile.ZipFile) -> set[str]:
    """Files of the wheel without its metadata."""
    return {n for n in wheel.namelist() if ".dist-info/" not in n}


def in_tree(pattern: str) -> set[str]:
    """Files of the source roots, named as they would be imported."""
    found = {(p, root) for root in SOURCE_ROOTS for p in (ROOT / root).rglob(pattern) if p.is_file()}
    return {str(p.relative_to(ROOT / root)) for p, root in found if "__pycache__" not in p.parts}


def test_top_level_names_are_the_packages(wheel: zipfile.ZipFile):
    packages = {p.parent.name for root in SOURCE_ROOTS for p in (ROOT / root).glob("*/__init__.py")}
    assert {n.split("/")[0] for n in in_wheel(wheel)} == packages


@pytest.mark.parametrize("pattern", ["*.yaml", "*.py", "py.typed"])
def test_every_file_of_the_tree_is_in(wheel: zipfile.ZipFile, pattern: str):
    names = {n for n in in_wheel(wheel) if Path(n).match(pattern)}
    assert names == in_tree(pattern)
    assert names


def test_nothing_else_is_in(wheel: zipfile.ZipFile):
    assert in_wheel(wheel) - in_tree("*") == set()
    assert {Path(n).suffix for n in in_wheel(wheel)} <= {".py", ".yaml", ".typed", ".cpp", ".h"}


def test_metadata(wheel: zipfile.ZipFile):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(info))
    assert metadata["Name"] == "partita"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(n.endswith("LICENSE") for n in wheel.namelist())
    entries = wheel.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert all(f"{name} = {value}" in entries for name, value in project["entry-points"]["partita"].items())
