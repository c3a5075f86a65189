"""make_plan from config to table and files."""

from __future__ import annotations

import io
import pickle
import resource

import pytest
import yaml
from rich.console import Console

from partita.errors import ConfigError
from partita.plan.make import plan_dict
from partita.plan.table import count, print_plan


def text_of(planned, terminal: bool = False) -> str:
    out = io.StringIO()
    print_plan(planned, Console(file=out, force_terminal=terminal, width=140))
    return out.getvalue()


def test_default_config_has_no_problems_and_two_ranks_at_most(plan_of):
    planned = plan_of()
    planned.raise_problems()
    assert planned.plan.layout.world in (1, 2)
    assert planned.plan.schedule.global_batch == 16


def test_table_names_all_that_is_in_effect(plan_of):
    text = text_of(plan_of(launch__ranks=4, zero__stage=3, precision__name="bf16", recompute__policy="full"))
    for word in (
        "4 = shard 4",
        "compute bfloat16",
        "1/4 on each rank",
        "predicted",
        "parameters",
        "optimizer",
        "weights gathered",
    ):
        assert word in text
    assert "\x1b[" not in text


def test_terminal_gets_colour_or_boxes(plan_of):
    assert "\x1b[" in text_of(plan_of(), terminal=True)


def test_problems_come_after_the_table_and_all_together(plan_of):
    planned = plan_of(parallel__shard="many", recompute__policy="some", zero__prefetch=-1)
    text = text_of(planned)
    assert text.index("predicted") < text.index("can't be run: 3 problems")
    assert {p.key for p in planned.problems} == {"parallel.shard", "recompute.policy", "zero.prefetch"}
    with pytest.raises(ConfigError, match=r"1\. .*\n.*\n2\. (.|\n)*3\. ") as caught:
        planned.raise_problems()
    assert caught.value.exit_status == 2


def test_saved_plan_and_manifest_are_plain_yaml(plan_of, tmp_path):
    planned = plan_of(launch__ranks=2, zero__stage=2, train__micro_batch="auto", optimizer__lr=3e-4)
    planned.save(tmp_path / "run")
    plan = yaml.safe_load((tmp_path / "run/plan.yaml").read_text())
    assert plan["placement"] == {"parameters": [], "gradients": ["replicate", "shard"], "optimizer": ["replicate", "shard"]}
    assert plan["costs"][0]["exact"] is True
    lines = {x["key"]: x for x in yaml.safe_load((tmp_path / "run/manifest.yaml").read_text())}
    assert lines["train.micro_batch"]["in_effect"] == 8
    assert lines["zero.stage"]["asked"] == lines["zero.stage"]["in_effect"] == 2
    assert lines["optimizer.lr"]["in_effect"] == 3e-4
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manifest.yaml", "plan.yaml"]


def test_plan_can_be_pickled_for_spawned_ranks(plan_of):
    plan = plan_of(launch__ranks=2, zero__stage=3).plan
    assert plan_dict(pickle.loads(pickle.dumps(plan))) == plan_dict(plan)


def test_model_that_cant_be_built_names_the_node(plan_of):
    with pytest.raises(ConfigError, match="model: 'gpt' can't be built: width 64 can't be divided by 5 heads"):
        plan_of(model__heads=5)


def test_unknown_device_gives_the_nearest_names(plan_of):
    with pytest.raises(ConfigError, match=r"cluster.device: 'h10' is not in the device table.\n    -> did you mean 'h100'"):
        plan_of(cluster__device="h10", cluster__nodes=2)


def test_175b_on_1024_described_devices_is_small(plan_of):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = plan_of(
        cluster__nodes=128,
        cluster__devices_per_node=8,
        model__layers=96,
        model__width=12288,
        model__heads=96,
        model__vocab=51200,
        data__sequence=2048,
        train__global_batch=1024,
        precision__name="bf16",
        zero__stage=3,
        recompute__policy="full",
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    planned.raise_problems()
    assert planned.plan.layout.shard == 1024
    text = text_of(planned)
    assert "174.6 B parameters" in text and "128 x 8 h100" in text


def test_a_plan_that_cant_fit_is_refused_with_numbers_and_a_way_out(plan_of):
    planned = plan_of(cluster__nodes=1, cluster__devices_per_node=8, cluster__device="h100", model__width=8192, model__layers=16)
    (problem,) = planned.problems
    assert problem.key == "zero.stage"
    assert "each rank needs" in problem.reason and "GiB" in problem.reason and "h100" in problem.reason
    assert "zero.stage=1, 2 or 3" in problem.remedy
    assert not plan_of(
        cluster__nodes=1, cluster__devices_per_node=8, cluster__device="h100", model__width=8192, model__layers=16, zero__stage=3
    ).problems


@pytest.mark.parametrize(
    ("number", "words"), [(7, "7"), (1500, "1.5 k"), (124.4e6, "124.4 M"), (174.6e9, "174.6 B"), (1.2e12, "1.2 T")]
)
def test_count(number, words):
    assert count(number) == words
