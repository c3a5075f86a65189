"""make_plan from config to table."""

from __future__ import annotations

from rich.console import Console

from partita.plan.table import print_plan


def test_smoke(plan_of):
    planned = plan_of(launch__ranks=4, zero__stage=3, precision__name="bf16", recompute__policy="selective", train__micro_batch=2)
    print_plan(planned)
    print_plan(
        plan_of(
            parallel__tensor=2,
            parallel__pipeline=2,
            parallel__data=2,
            offload__optimizer="file",
            recompute__policy="budget",
            zero__stage=2,
            zero__preset="hsdp",
            moe__name="switch",
            offload__parameters="host",
            compression__gradient_reduce="int8",
        ),
        Console(force_terminal=True, width=120),
    )
    assert not planned.problems
