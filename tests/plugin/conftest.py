"""Plug-ins written to disk as distributions, found through their real metadata."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest

from partita.plugin.registry import Registry


class Shelf:
    """A folder on sys.path that plays site-packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        name: str,
        code: str,
        *,
        dist: str | None = None,
        version: str = "0.3",
        api: str = "partita_api = 1",
        value: str = "",
    ) -> None:
        """A distribution with one module `plug_NAME` and one entry point. `code` follows the imports and `api`."""
        header = (
            "from partita.plugin.markers import hookimpl\n"
            "from partita.plugin.types import ConfigContribution, Cost, Transform\n" + api + "\n"
        )
        dist = dist or f"partita-{name}"
        module = f"plug_{dist.replace('-', '_')}_{name}"
        (self.folder / f"{module}.py").write_text(header + textwrap.dedent(code))
        info = self.folder / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        file = info / "entry_points.txt"
        before = file.read_text() if file.exists() else "[partita]\n"
        file.write_text(before + f"{name} = {module}{value}\n")

    def entry_points(self) -> list[EntryPoint]:
        """What importlib.metadata finds in the folder, in no promised order."""
        return [e for d in distributions(path=[str(self.folder)]) for e in d.entry_points if e.group == "partita"]

    def load(self, block: Sequence[str] = ()) -> Registry:
        """A registry of these plug-ins only."""
        return Registry.load(block, self.entry_points())

    def imported(self) -> set[str]:
        """Modules of this shelf that were imported."""
        return {n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(self.folder))}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """An empty shelf; its modules are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made = Shelf(folder)
    yield made
    for name in made.imported():
        del sys.modules[name]


@pytest.fixture
def refused() -> Callable[[Callable[[], object]], str]:
    """Calls a function that must raise PluginError; returns its text."""
    from partita.errors import PluginError

    def call(function: Callable[[], object]) -> str:
        with pytest.raises(PluginError) as caught:
            function()
        assert caught.value.exit_status == 2
        return str(caught.value)

    return call
