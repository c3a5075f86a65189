"""docs/hooks.md says of each hook and slot what the code says, no more and no less."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from partita.plugin import hookspecs
from partita.plugin.checks import HOOKS
from partita.plugin.markers import API
from partita.plugin.ordering import ANCHORS
from partita.plugin.slots import SLOTS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "hooks.md").read_text()


def sections() -> dict[str, str]:
    """Hook -> the text below its heading, on one line."""
    parts = re.split(r"^### `(\w+)\(.*`$", TEXT, flags=re.MULTILINE)
    return {name: " ".join(body.split()) for name, body in zip(parts[1::2], parts[2::2])}


def heading(hook: str) -> str:
    signature = inspect.signature(getattr(hookspecs, hook))
    returns = "" if signature.return_annotation == "None" else f" -> {signature.return_annotation}"
    return f"### `{hook}({', '.join(signature.parameters)}){returns}`"


def test_all_hooks_in_order():
    assert list(sections()) == list(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook(hook: str):
    assert f"\n{heading(hook)}\n" in TEXT
    told = " ".join((inspect.getdoc(getattr(hookspecs, hook)) or "").split())
    assert sections()[hook].startswith(told), f"docs/hooks.md must say below {hook}: {told}"


@pytest.mark.parametrize("hook", HOOKS)
def test_docstrings_say_when_and_where(hook: str):
    assert re.search(r"[Cc]alled (everywhere|in the process|where|on every rank|on the rank)|every rank", sections()[hook]), hook


def test_slots():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", TEXT, flags=re.MULTILINE))
    assert rows == SLOTS


def test_the_core_asks_for_every_slot():
    code = "\n".join(p.read_text() for p in (ROOT / "framework" / "partita").rglob("*.py"))
    asked = set(re.findall(r"provide\(\s*\"(\w+)\"", code))
    assert asked == set(SLOTS) - {"tracker"}


def test_anchors_and_api():
    assert "    " + " ".join(ANCHORS) + "\n" in TEXT
    assert f"partita_api = {API}" in TEXT


def test_python_in_the_guide_is_a_plugin():
    """The fragment at the top loads as it stands."""
    from types import ModuleType

    from partita.plugin.checks import hook_problems, implemented

    code = "\n".join(line[4:] for line in re.findall(r"^    .*$", TEXT, flags=re.MULTILINE) if "[project" not in line)
    fragment = code[code.index("from partita") : code.index("...") + 3]
    module = ModuleType("fragment")
    exec(compile(fragment, "docs/hooks.md", "exec"), module.__dict__)
    assert implemented(module) == ["partita_step_end"]
    assert hook_problems(module, "fragment") == []
