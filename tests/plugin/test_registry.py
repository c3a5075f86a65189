"""What the registry refuses, in words that name the plug-in, the reason and the way out; and what it hands out."""

from __future__ import annotations

import pytest

from partita.errors import PluginError
from partita.plan.plan import Activations, Placement, Plan
from partita.plan.problems import Problem
from partita.plugin.registry import Registry, block_from_argv

HOOK = "@hookimpl\n"
NODE = f"""
import dataclasses
{HOOK}def partita_config(): return ConfigContribution(nodes={{'moe': N}})
@dataclasses.dataclass
class N: pass
"""

# name -> (plug-ins as (name, code, keywords), words that the message must have)
REFUSALS = {
    "import error": (
        [("moe", "import nothere_xyz", {})],
        ["'moe'", "partita-moe 0.3", "No module named 'nothere_xyz'", "plug_partita_moe_moe.py:4", "plugins.block=[moe]"],
    ),
    "import error of any kind": ([("moe", "1 / 0", {})], ["'moe'", "ZeroDivisionError", "plugins.block=[moe]"]),
    "exit while importing": ([("moe", "raise SystemExit(3)", {})], ["'moe'", "SystemExit"]),
    "entry point without its attribute": ([("moe", "", {"value": ":nothing"})], ["'moe'", "nothing", "failed to import"]),
    "duplicate names": (
        [("moe", "", {"dist": "alpha"}), ("moe", "", {"dist": "beta"})],
        ["'moe'", "2 distributions", "alpha 0.3", "beta 0.3", "uninstall all but one"],
    ),
    "no api level": ([("moe", "", {"api": ""})], ["partita-moe 0.3", "states no `partita_api`", "partita_api = 1"]),
    "api level is no number": ([("moe", "", {"api": "partita_api = '1'"})], ["'1'", "no whole number"]),
    "newer api level": ([("moe", "", {"api": "partita_api = 2"})], ["API 2", "has 1", "update Partita", "plugins.block=[moe]"]),
    "older api level": ([("moe", "", {"api": "partita_api = 0"})], ["API 0", "update partita-moe"]),
    "unknown hook": (
        [("moe", HOOK + "def partita_step_ends(run): pass", {})],
        ["partita-moe 0.3", "no hook 'partita_step_ends'", "'partita_step_end'"],
    ),
    "misspelt argument": (
        [("moe", HOOK + "def partita_step_end(run, setp): pass", {})],
        ["partita_step_end has an argument 'setp'", "'step'", "partita_step_end(run, step, metrics)"],
    ),
    "default in an implementation": (
        [("moe", HOOK + "def partita_step_end(run, step=0): pass", {})],
        ["argument 'step' a default", "write step without one"],
    ),
    "keyword-only argument": ([("moe", HOOK + "def partita_step_end(*, run): pass", {})], ["takes run", "never filled"]),
    "catch-all argument": ([("moe", HOOK + "def partita_step_end(**rest): pass", {})], ["takes **rest", "never filled"]),
    "forgotten marker": ([("moe", "def partita_step_end(run): pass", {})], ["partita_step_end is not marked", "@hookimpl"]),
    "wrapper of a hook that is asked one by one": (
        [("moe", "@hookimpl(wrapper=True)\ndef partita_decide(draft):\n    return (yield)", {})],
        ["partita_decide is a wrapper", "return a result of your own"],
    ),
    "class instead of instance": (
        [("moe", "class Moe:\n    partita_api = 1\n", {"value": ":Moe"})],
        ["the class Moe", "plugin = Moe()", ":plugin"],
    ),
    "two owners of a section": (
        [(n, HOOK + "def partita_config(): return ConfigContribution(sections=('placement',))", {}) for n in ("one", "two")],
        ["plan section 'placement'", "'one'", "'two'", "plugins.block=[two]"],
    ),
    "unknown section": (
        [("moe", HOOK + "def partita_config(): return ConfigContribution(sections=('placment',))", {})],
        ["'moe'", "no section 'placment'", "'placement'"],
    ),
    "same name in a slot": (
        [(n, HOOK + "def partita_slots(): return {'optimizer': ['lion']}", {}) for n in ("one", "two")],
        ["slot 'optimizer'", "'lion'", "'one'", "'two'"],
    ),
    "same name in a slot twice": (
        [("one", HOOK + "def partita_slots(): return {'optimizer': ['lion', 'lion']}", {})],
        ["'lion' is given twice"],
    ),
    "unknown slot": (
        [("moe", HOOK + "def partita_slots(): return {'optimiser': ['lion']}", {})],
        ["no slot 'optimiser'", "'optimizer'", "moe.optimiser"],
    ),
    "a word instead of a list of names": (
        [("moe", HOOK + "def partita_slots(): return {'optimizer': 'lion'}", {})],
        ["slot 'optimizer'", "'lion'", "list of names"],
    ),
    "slots are no mapping": (
        [("moe", HOOK + "def partita_slots(): return ['lion']", {})],
        ["returned a list", "{slot: [name, ...]}"],
    ),
    "same config node": ([(n, NODE, {}) for n in ("one", "two")], ["config node 'moe'", "'one'", "'two'"]),
    "a node of the core": (
        [("moe", HOOK + "def partita_config(): return ConfigContribution(nodes={'train': int})", {})],
        ["'train' is the core's"],
    ),
    "schema is no dataclass": (
        [("moe", HOOK + "def partita_config(): return ConfigContribution(nodes={'moe': int})", {})],
        ["'moe'", "give a dataclass"],
    ),
    "schema without a default": (
        [
            (
                "moe",
                f"import dataclasses\n{HOOK}def partita_config(): return ConfigContribution(nodes={{'moe': N}})\n"
                "@dataclasses.dataclass\nclass N:\n    experts: int",
                {},
            )
        ],
        ["'moe'", "experts", "default"],
    ),
    "config hook returns something else": (
        [("moe", HOOK + "def partita_config(): return {}", {})],
        ["returned a dict", "ConfigContribution"],
    ),
    "config package is not there": (
        [("moe", HOOK + "def partita_config(): return ConfigContribution(packages=('nothere_conf',))", {})],
        ["'nothere_conf' can't be found"],
    ),
    "config package without YAML": (
        [("moe", HOOK + "def partita_config(): return ConfigContribution(packages=('json',))", {})],
        ["'json' holds no YAML file"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused(case, shelf, refused):
    plugins, words = REFUSALS[case]
    for name, code, keywords in plugins:
        shelf.add(name, code, **keywords)
    text = refused(shelf.load)
    for word in words:
        assert word in text
    assert "\n    -> " in text  # a remedy


def test_all_problems_are_told_at_once(shelf, refused):
    shelf.add("one", "import nothere_xyz")
    shelf.add("two", HOOK + "def partita_dcide(draft): pass")
    shelf.add("three", "", api="partita_api = 9")
    text = refused(shelf.load)
    assert [line[:2] for line in text.splitlines() if line[0].isdigit()] == ["1.", "2.", "3."]
    assert all(f"partita-{name} 0.3" in text for name in ("one", "two", "three"))


def test_blocked_is_not_imported_and_the_rest_loads(shelf):
    shelf.add("broken", "import nothere_xyz")
    shelf.add("fine", HOOK + "def partita_slots(): return {'loss': ['mine']}")
    registry = shelf.load(["broken"])
    assert registry.names == ["fine"]
    assert registry.blocked == ("broken",)
    assert shelf.imported() == {"plug_partita_fine_fine"}
    assert [(i.name, i.blocked) for i in registry.describe()] == [("broken", True), ("fine", False)]


def test_blocking_a_stranger_names_the_nearest(shelf, refused):
    shelf.add("broken", "")
    assert "did you mean 'broken'?" in refused(lambda: shelf.load(["broke"]))


def test_the_core_cannot_be_blocked(refused):
    assert "nothing runs without it" in refused(lambda: Registry.load(["core"]))


def test_order_does_not_depend_on_discovery(shelf):
    for name, dist in (("zeta", "alpha"), ("beta", "omega"), ("alpha", "omega"), ("mid", "middle")):
        shelf.add(name, "", dist=dist)
    entries = shelf.entry_points()
    orders = {tuple(Registry.load((), order).names) for order in (entries, entries[::-1])}
    assert orders == {("zeta", "mid", "alpha", "beta")}


# ------------------------------------------------------------------ what it hands out


def test_objects_and_modules_are_plugins(shelf):
    shelf.add("module", HOOK + "def partita_slots(): return {'loss': ['a']}")
    code = f"class P:\n    partita_api = 1\n    {HOOK}    def partita_slots(self): return {{'loss': ['b']}}\nplugin = P()"
    shelf.add("object", code, value=":plugin")
    shelf.add(
        "static", code.replace("    @", "    @staticmethod\n    @").replace("self", "").replace("'b'", "'c'"), value=":plugin"
    )
    assert shelf.load().slots() == {"loss": {"a": "module", "b": "object", "c": "static"}}


def test_provide_asks_the_one_that_lists_a_name_then_everyone(shelf, refused):
    shelf.add(
        "one",
        HOOK
        + "def partita_slots(): return {'loss': ['mine']}\n"
        + HOOK
        + "def partita_provide(slot, name): return f'one {name}'",
    )
    shelf.add(
        "two", HOOK + "def partita_slots(): return {'loss': ['yours']}\n" + HOOK + "def partita_provide(slot, name): return 'two'"
    )
    shelf.add("bad", HOOK + "def partita_slots(): return {'loss': ['gone']}")
    registry = shelf.load()
    assert registry.provide("loss", "mine") == "one mine"
    assert registry.provide("loss", "yours") == "two"
    assert registry.provide("loss", "unlisted") in ("two", "one unlisted")


def test_provide_without_an_answer(shelf, refused):
    shelf.add("one", HOOK + "def partita_slots(): return {'loss': ['focal', 'hinge'], 'one.part': ['x']}")
    registry = shelf.load()
    text = refused(lambda: registry.provide("loss", "focl"))
    assert "slot 'loss' has nothing called 'focl'" in text
    assert "'focal'" in text and "hinge" in text
    assert "'loss'" in refused(lambda: registry.provide("los", "focal"))
    assert "no plug-in in use fills it" in refused(lambda: registry.provide("model", "gpt"))
    assert "lists 'focal'" in refused(lambda: registry.provide("loss", "focal"))
    assert "slot 'one.part' has nothing called 'y'" in refused(lambda: registry.provide("one.part", "y"))


def test_values_that_are_falsy_count(shelf):
    shelf.add("one", HOOK + "def partita_provide(slot, name): return 0")
    assert shelf.load().provide("loss", "x") == 0


def test_errors_in_hooks_say_whose_they_are(shelf):
    shelf.add("one", HOOK + "def partita_transforms(plan): raise ValueError('no')")
    with pytest.raises(ValueError, match="no") as caught:
        shelf.load().transforms(Plan())
    assert caught.value.__notes__ == ["(raised by partita_transforms of plug-in 'one')"]


def test_has(shelf, refused):
    shelf.add("one", HOOK + "def partita_step_end(run): pass")
    registry = shelf.load()
    assert registry.has("partita_step_end")
    assert not registry.has("partita_save")
    assert "'partita_save'" in refused(lambda: registry.has("partita_sav"))


def test_observers_are_all_called(shelf):
    for name in ("one", "two"):
        shelf.add(name, HOOK + f"def partita_step_end(metrics, step): metrics['{name}'] = step")
    metrics: dict = {}
    shelf.load().hook.partita_step_end(run=None, step=3, metrics=metrics)
    assert metrics == {"one": 3, "two": 3}


class Draft:
    """As much of a PlanDraft as the order of decisions shows."""

    owner = ""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []


def test_decide_goes_by_sections_then_names(shelf):
    code = HOOK + "def partita_decide(draft): draft.told.append(('{0}', draft.owner))\n"
    owns = HOOK + "def partita_config(): return ConfigContribution(sections=({1!r},))\n"
    for name, section in (("a", "collectives"), ("b", "placement"), ("c", "layout")):
        shelf.add(name, (code + owns).format(name, section))
    for name in ("z", "y"):
        shelf.add(name, code.format(name))
    draft = Draft()
    registry = shelf.load()
    registry.decide(draft)  # type: ignore[arg-type]
    assert draft.told == [(n, n) for n in ("c", "b", "a", "y", "z")]
    assert draft.owner == ""
    assert registry.section_owners() == {"collectives": "a", "placement": "b", "layout": "c"}


def test_checks_and_estimates_are_gathered(shelf, refused):
    shelf.add(
        "one", "from partita.plan.problems import Problem\n" + HOOK + "def partita_check(plan): return [Problem('a', 'b', 'c')]"
    )
    shelf.add(
        "two", HOOK + "def partita_check(): return None\n" + HOOK + "def partita_estimate(): return [Cost('buffers', 'w', 5)]"
    )
    registry = shelf.load()
    assert registry.check(Plan(), None) == [Problem("a", "b", "c")]  # type: ignore[arg-type]
    assert [c.bytes for c in registry.estimate(Plan(), None)] == [5]  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "words"), [("'no'", "returned a str"), ("['no']", "a str in its list")])
def test_wrong_results_are_refused(value, words, shelf, refused):
    shelf.add("one", HOOK + f"def partita_check(): return {value}")
    registry = shelf.load()
    text = refused(lambda: registry.check(Plan(), None))
    assert words in text and "list of Problem" in text


def test_two_transforms_of_one_name(shelf, refused):
    for name in ("one", "two"):
        shelf.add(name, HOOK + "def partita_transforms(): return [Transform('lora', lambda m, c: m)]")
    registry = shelf.load()
    text = refused(lambda: registry.transforms(Plan(placement=Placement(), activations=Activations())))
    assert "'one'" in text and "'two'" in text and "'lora'" in text


def test_packages_are_found_and_options_collide(shelf, refused):
    package = shelf.folder / "their_conf"
    (package / "zoo").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "zoo" / "tiger.yaml").write_text("a: 1\n")
    config = HOOK + "def partita_config(): return ConfigContribution(packages=('their_conf',))"
    shelf.add("one", config)
    registry = shelf.load()
    assert registry.packages() == ["their_conf"]
    assert registry.describe()[0].groups == (("zoo", ("tiger",)),)
    other = shelf.folder / "other_conf" / "zoo"
    other.mkdir(parents=True)
    (other.parent / "__init__.py").touch()
    (other / "tiger.yaml").write_text("a: 2\n")
    shelf.add("two", config.replace("their_conf", "other_conf"))
    text = refused(shelf.load)
    assert "zoo/tiger" in text and "their_conf" in text and "other_conf" in text


# ------------------------------------------------------------------ plugins.block


@pytest.mark.parametrize(
    ("argv", "variable", "names"),
    [
        ([], "", []),
        (["train.steps=3", "plugins.block=[moe]"], "", ["moe"]),
        (["+plugins.block=[moe, 'wandb']"], "", ["moe", "wandb"]),
        (["++plugins.block=moe"], "", ["moe"]),
        (["plugins.block=[moe]", "plugins.block=[]"], "", []),
        (["plugins.block=[moe]"], "wandb, zero", ["moe", "wandb", "zero"]),
        (["data.path=plugins.block", "x=plugins.block=[moe]"], "", []),
    ],
)
def test_block_from_argv(argv, variable, names):
    assert block_from_argv(argv, {"PARTITA_BLOCK_PLUGINS": variable}) == names


@pytest.mark.parametrize("value", ["[moe],[wandb]", "moe,wandb", "null", "${other}", "{a: b}"])
def test_block_that_is_no_list(value, refused):
    text = refused(lambda: block_from_argv([f"plugins.block={value}"], {}))
    assert "plugins.block" in text and value in text


def test_partita_without_its_metadata(monkeypatch, refused):
    monkeypatch.setattr("partita.plugin.discovery.installed_entry_points", lambda group: [])
    text = refused(Registry.load)
    assert "not installed" in text and "pip install --editable ." in text


def test_no_plugin_at_all_is_a_registry():
    registry = Registry.load((), [])
    assert registry.names == [] and registry.nodes() == {} and registry.transforms(Plan()) == []
    with pytest.raises(PluginError):
        registry.provide("model", "gpt")
