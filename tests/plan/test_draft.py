"""Sections have one writer; the manifest tells what differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from partita.errors import PluginError
from partita.plan.cluster import Cluster
from partita.plan.draft import PlanDraft
from partita.plan.manifest import Line, make_manifest
from partita.plan.plan import Layout, Placement, Plan


def draft(**fields: Any) -> PlanDraft:
    return PlanDraft(config=None, model=None, cluster=Cluster(), **fields)  # type: ignore[arg-type]


def test_sections_have_defaults_and_one_owner():
    d = draft(owners={"layout": "parallel"}, owner="parallel")
    assert d.get("layout") == Layout()
    d.write("layout", Layout(shard=2))
    assert d.get("layout").shard == 2
    with pytest.raises(PluginError, match="'parallel' wrote plan section 'layout' twice"):
        d.write("layout", Layout())


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("layout", Layout(), "'zero' wrote plan section 'layout', which 'parallel' owns"),
        ("placement", Layout(), "wrote a Layout into plan section 'placement'; it takes a Placement"),
        ("placment", Placement(), "did you mean 'placement'"),
    ],
)
def test_wrong_writes(section, value, message):
    with pytest.raises(PluginError, match=message):
        draft(owners={"layout": "parallel"}, owner="zero").write(section, value)


def test_extensions_have_one_name_each():
    d = draft(owner="one")
    d.extend("prefetch", 2)
    for taken in ("prefetch", "layout"):
        with pytest.raises(PluginError, match=f"adds '{taken}' to the plan, but that name is taken"):
            d.extend(taken, 3)
    plan = d.freeze()
    assert plan.extensions["prefetch"] == 2
    assert plan.layout == Plan().layout


def test_manifest_has_what_was_set_and_what_came_of_it():
    @dataclass
    class Node:
        a: int = 1
        b: list[int] = field(default_factory=list)
        c: str = "auto"

    @dataclass
    class Root:
        node: Node = field(default_factory=Node)

    manifest = make_manifest(Root(Node(a=5, b=[1])), [Line("node.b", [1], [], "no room"), Line("node.c", "auto", "x")])
    assert [(x.key, x.asked, x.got) for x in manifest] == [("node.a", 5, 5), ("node.b", [1], []), ("node.c", "auto", "x")]
    assert [x.key for x in manifest.differences()] == ["node.b"]
    assert manifest.as_list()[1]["why"] == "no room"
