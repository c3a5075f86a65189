"""The plan as a person reads it: what runs where, what it takes, what differs from what was asked, what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partita.plan.estimate import MEMORY, memory_total, model_flops, speed
from partita.plan.make import Planned
from partita.plan.memory import words
from partita.plan.plan import AXES, Plan
from partita.plan.problems import render
from partita.plan.rank_placement import notes, placement_words

PLAIN_WIDTH = 130  # columns where no terminal says how many it has


def print_plan(planned: Planned, console: Console | None = None, problems: bool = True) -> None:
    """Print plan, estimates, differences and, unless someone else does, problems. Plain text where the console is no terminal."""
    out = console or Console()
    if not out.is_terminal:
        out = Console(file=out.file, width=max(out.width, PLAIN_WIDTH), no_color=True, highlight=False)
    _print_table(out, f"Plan for {_model_words(planned)} on {planned.cluster.words()}", ("what", "in effect"), _sections(planned))
    _print_table(out, "Memory of the fullest rank", ("category", "bytes", "what", "where"), _memory(planned))
    sent = list(_step(planned))
    if sent:
        _print_table(out, "One step", ("category", "bytes sent", "seconds", "what", "link"), sent)
    if planned.choice:
        rows = [(f"{r.seconds:.3g}" if r.seconds else "", r.plan, r.verdict) for r in planned.choice.rows]
        title = f"Choice of the planner, of {planned.choice.compared} plans in {planned.choice.layouts} layouts"
        _print_table(out, title, ("seconds", "plan", "verdict"), rows)
    differences = [(x.key, str(x.asked), str(x.got), x.reason) for x in planned.manifest.differences()]
    if differences:
        _print_table(out, "Not as written", ("key", "asked", "in effect", "why"), differences)
    for note in notes(planned.draft, planned.plan, planned.costs):
        out.print(Text(f"note: {note}"))
    if problems and planned.problems:
        count = len(planned.problems)
        out.print(Text(f"This plan can't be run: {count} problem{'s' if count > 1 else ''}", style="bold red"))
        out.print(Text(render(planned.problems)))


def _print_table(out: Console, title: str, columns: tuple[str, ...], rows: Any) -> None:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD if out.is_terminal else ASCII, show_edge=False, pad_edge=False
    )
    for column in columns:
        table.add_column(column, justify="right" if column in ("bytes", "bytes sent", "seconds") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)
    out.print()


def _model_words(planned: Planned) -> str:
    model, name = planned.model, planned.draft.config.model.name
    frozen = f", {count(model.trainable)} trained" if model.trainable != model.numel else ""
    return f"{name}: {count(model.numel)} parameters{frozen}, {len(model.blocks)} blocks"


def count(number: float) -> str:
    """A large number in words: 1.5 k, 124.4 M, 174.6 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def _sections(planned: Planned) -> Iterator[tuple[str, str]]:
    plan = planned.plan
    layout, schedule, precision = plan.layout, plan.schedule, plan.precision
    axes = " x ".join(f"{a} {getattr(layout, a)}" for a in AXES if getattr(layout, a) > 1)
    expert = f", expert {layout.expert} folded over data" if layout.expert > 1 else ""
    yield "ranks", f"{layout.world}" + (f" = {axes}" if axes else "") + expert
    stages = f", pipeline {schedule.name}" if schedule.name != "none" else ""
    equation = f"data {layout.data} x micro-batch {schedule.micro_batch} x {schedule.micro_batches} passes{stages}"
    if layout.world > 1:
        yield "placement", placement_words(planned.cluster, layout)
    yield "batch", f"{schedule.global_batch} sequences = {equation}"
    yield "precision", _precision_words(plan)
    for state in ("parameters", "gradients", "optimizer"):
        yield state, f"{_cut_words(plan, state)}, {_tier_words(plan, state)}"
    named = plan.activations.patterns or plan.activations.operators
    patterns = f" ({', '.join(named)})" if named else ""
    yield "activations", plan.activations.default + patterns + ", " + _tier_words(plan, "activations")
    wires = plan.collectives
    reduced = precision.reduce if wires.gradient_reduce.format == "native" else wires.gradient_reduce.format
    gathered = precision.compute if wires.parameter_gather.format == "native" else wires.parameter_gather.format
    levels = "; in two levels" if wires.gradient_reduce.algorithm != "flat" else ""
    yield "on the wire", f"gradients {reduced}, weights {gathered}{levels}{_link_words(planned)}"


def _link_words(planned: Planned) -> str:
    """How fast the links are that it travels on."""
    cluster = planned.cluster
    rates = {"in a node": cluster.intra_bandwidth, "between nodes": cluster.inter_bandwidth if cluster.nodes > 1 else None}
    known = [f"{words(rate)}/s {where}" for where, rate in rates.items() if rate and planned.plan.layout.world > 1]
    return f" (links: {', '.join(known)})" if known else ""


def _precision_words(plan: Plan) -> str:
    p = plan.precision
    scale = f", loss scale from {p.loss_scale.initial:g}" if p.loss_scale else ""
    return f"compute {p.compute}, gradients {p.gradient}, master {p.master}, moments {p.optimizer}{scale}"


def _cut_words(plan: Plan, state: str) -> str:
    axes = getattr(plan.placement, state)
    if not axes:
        return "whole on every rank"
    return f"1/{plan.layout.size(axes)} on each rank (over {', '.join(axes)})"


def _tier_words(plan: Plan, state: str) -> str:
    tier = getattr(plan.tiers, state)
    if tier.place == "accelerator":
        return "where compute runs"
    where = f"{tier.place} {plan.tiers.path}" if tier.place == "file" and plan.tiers.path else tier.place
    return f"{tier.fraction:.0%} on {where}"


def _memory(planned: Planned) -> Iterator[tuple[str, str, str, str]]:
    for category in MEMORY:
        for cost in planned.costs:
            if cost.category == category:
                about = "" if cost.exact or not cost.bytes else "~ "
                yield category, about + words(cost.bytes), cost.what, "" if cost.place == "accelerator" else cost.place
    total, capacity = memory_total(planned.costs), planned.cluster.capacity(planned.plan.layout.world)
    of = f"of {words(capacity)} = {total / capacity:.1%}" if capacity else "of an unknown capacity"
    yield "predicted", words(total), of, ""
    for place in ("host", "file"):
        moved = memory_total(planned.costs, place)
        if moved:
            yield "predicted", words(moved), "for each rank", place


def _step(planned: Planned) -> Iterator[tuple[str, str, str, str, str]]:
    for cost in planned.costs:
        if cost.category not in MEMORY:
            link = cost.place if cost.category == "communication" else ""
            yield (
                cost.category,
                words(cost.bytes) if cost.bytes else "",
                f"{cost.seconds:.3g}" if cost.seconds else "",
                cost.what,
                link,
            )
    flops = model_flops(planned.draft, planned.plan)
    yield "compute", "", "", f"{flops:.3g} FLOPs of the model", ""
    reached = speed(planned.draft, planned.plan, planned.costs)
    if reached:
        mfu = f", MFU {reached.mfu:.1%}" if reached.mfu else ""
        yield "predicted", "", f"{reached.seconds:.3g}", f"{count(reached.tokens)} tokens/s{mfu}", ""
        yield "rates", "", "", planned.cluster.rates.source, ""
