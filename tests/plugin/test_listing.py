"""What `partita plugins` prints."""

from __future__ import annotations

from partita.plugin.listing import render
from partita.plugin.registry import PluginInfo, Registry


def test_all_that_a_plugin_adds(shelf):
    shelf.add(
        "moe",
        """
        import dataclasses

        @dataclasses.dataclass
        class Moe:
            experts: int = 1

        @hookimpl
        def partita_config(): return ConfigContribution(nodes={"mine": Moe}, sections=("collectives",))

        @hookimpl
        def partita_slots(): return {"loss": ["a", "b"], "moe.router": ["top"]}

        @hookimpl
        def partita_step_end(run): pass
        """,
    )
    text = render(shelf.load().describe())
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert {
        "moe partita-moe 0.3",
        "hooks config slots step_end",
        "plan collectives",
        "config mine.*",
        "slots loss=a|b moe.router=top",
    } <= lines
    assert str(shelf.folder / "plug_partita_moe_moe.py") in text


def test_blocked_ones_are_listed(shelf):
    shelf.add("moe", "import nothere_xyz")
    text = render(shelf.load(["moe"]).describe())
    assert "blocked, not imported" in text and "plug_partita_moe_moe" in text


def test_lines_are_wrapped_but_paths_stay_whole():
    path = "/very" * 30 + "/long.py"
    info = PluginInfo("x", "partita-x", "1", "partita_x", path, hooks=tuple(f"partita_hook{i}" for i in range(30)))
    lines = render([info], width=60).splitlines()
    assert [line.strip() for line in lines if len(line) > 60] == [path]
    assert sum("hook" in line for line in lines) > 3


def test_our_own_are_listed_with_their_groups():
    text = render(Registry.load().describe(), width=1000)
    for words in ("options zero=", " model=gpt", "plan    layout schedule", "config  tracker.*"):
        assert words in text
