"""Plans of published trainings against the times that were published. Nothing is fitted here: the rates are those of plan/rates.py."""

from __future__ import annotations

import pytest
from published import STEPS

from partita.config.compose import compose_config, registry_for
from partita.plan.estimate import memory_total, model_flops, speed
from partita.plan.make import make_plan
from partita.state.capabilities import CAPABILITIES

TOLERANCE = 0.15


def planned(*overrides):
    config, _ = compose_config(list(overrides))
    return make_plan(config, registry_for(()))


@pytest.mark.parametrize("row", STEPS, ids=lambda row: row.name)
def test_steps_take_as_long_as_published(row):
    """Within 15 %; where the model lacks something it is too fast, by no more than is said."""
    plan = planned(*row.overrides)
    found = speed(plan.draft, plan.plan, plan.costs).seconds
    if row.lacks:
        assert row.seconds / (1 + row.off) < found < row.seconds
    else:
        assert found == pytest.approx(row.seconds, rel=row.off)


@pytest.fixture
def everything(monkeypatch):
    """As if the engine could carry out all that the planner knows of."""
    for name, value in {
        "axes": frozenset({"pipeline", "replicate", "shard", "context", "tensor", "expert"}),
        "tiers": frozenset({"accelerator", "host", "file"}),
        "schedules": frozenset({"none", "1f1b", "interleaved", "zbv", "dualpipev"}),
    }.items():
        monkeypatch.setitem(CAPABILITIES, name, value)


def test_175b_on_1024_devices_is_solved_in_little_memory_and_like_the_best_published(everything):
    """51.4 % of peak for 175 billion parameters (Korthikanti et al. 2022, table 5), where nothing but attention is computed again."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    free = ["parallel=auto", "zero=auto", "recompute=auto", "offload=auto", "train.micro_batch=auto"]
    plan = planned("+experiment=gpt3_175b", *free)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB
    plan.raise_problems()
    found = speed(plan.draft, plan.plan, plan.costs)
    assert found.mfu == pytest.approx(0.514, rel=TOLERANCE)
    assert plan.plan.layout.tensor <= 8, "tensor groups stay in a node"
    layout = planned("+experiment=gpt3_175b")
    assert found.seconds < speed(layout.draft, layout.plan, layout.costs).seconds, "better than what was written out"


def test_13b_fits_a_32_gb_device_with_its_states_on_the_host(everything):
    plan = planned("+experiment=offload_13b")
    assert not [p for p in plan.problems if "memory" in p.reason or "GiB" in p.reason]
    assert plan.model.numel == pytest.approx(13e9, rel=0.05)
    assert memory_total(plan.costs) < 32e9 < memory_total(plan.costs, "host") < plan.cluster.host_memory
    found = speed(plan.draft, plan.plan, plan.costs)
    reached = model_flops(plan.draft, plan.plan) / found.seconds
    assert 20e12 < reached < 60e12  # 30 to 40 TFLOP/s published (Ren et al. 2021, section 6.2)


def test_llama_405b_predicts_its_published_layout():
    """MFU 41 % on 16,384 H100 (Dubey et al. 2024, table 4), whose pipeline is interleaved."""
    plan = planned("+experiment=llama3_405b")
    plan.raise_problems()
    assert plan.model.numel == pytest.approx(405e9, rel=0.01)
    layout = plan.plan.layout
    assert (layout.tensor, layout.pipeline, layout.data) == (8, 16, 128)
    assert speed(plan.draft, plan.plan, plan.costs).mfu == pytest.approx(0.41, rel=TOLERANCE)
