"""Which options of `layout` say how matrices and samples are cut, and what the model or the batch can't be cut into."""

from __future__ import annotations

from typing import Any

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Layout
from partita.plan.problems import Problem

METHODS = ("ring", "ulysses")


def read_styles(lines: list[str]) -> list[tuple[str, str]]:
    """(pattern, style) of lines `pattern=style`; a line without `=` has an empty style, which is refused as unknown."""
    return [(pattern.strip(), style.strip()) for pattern, _, style in (line.partition("=") for line in lines)]


def cut_options(draft: PlanDraft, layout: Layout) -> dict[str, Any]:
    """How matrices and samples are cut; defaults where the axis has one rank."""
    from partita.plan.styles import model_styles  # torch is imported only where a plan is made

    config, found = draft.config.parallel, {}
    if layout.tensor > 1:
        styles = (*read_styles(config.styles), *model_styles(draft.model.module))
        found = {"styles": styles, "sequence_parallel": _by_tokens(draft), "spread_kv": config.replicate_kv}
    for key, idle in (("sequence_parallel", False), ("replicate_kv", False), ("styles", [])):
        if getattr(config, key) not in (idle, "auto") and layout.tensor == 1:
            draft.effect(f"parallel.{key}", getattr(config, key), idle, "parallel.tensor is 1")
    if config.context_method not in METHODS:
        remedy = did_you_mean(config.context_method, METHODS).capitalize()
        draft.problem(Problem("parallel.context_method", f"{config.context_method!r} is no way to cut attention.", remedy))
    elif layout.context > 1:
        found["context_method"] = config.context_method
    return found


def _by_tokens(draft: PlanDraft) -> bool:
    """parallel.sequence_parallel as true or false; `auto` has been filled in by the planner where there was a choice."""
    asked = draft.config.parallel.sequence_parallel
    if isinstance(asked, str) and asked != "auto":
        draft.problem(Problem("parallel.sequence_parallel", f"{asked!r} is no choice.", "Use true, false or auto."))
    return asked is True


def check_cuts(layout: Layout, draft: PlanDraft) -> list[Problem]:
    """Problems with legal values."""
    return [*_check_tensor(layout, draft), *_check_context(layout, draft)]


def _check_tensor(layout: Layout, draft: PlanDraft) -> list[Problem]:
    if layout.tensor == 1:
        return []
    from partita.plan.styles import style_problems

    problems = style_problems(draft.model.module, layout, dict(read_styles(draft.config.parallel.styles)))
    tokens = draft.config.data.sequence // layout.context
    if layout.sequence_parallel and tokens % layout.tensor:
        step = layout.tensor * layout.context
        reason = f"{tokens} tokens of a sequence can't be cut into {layout.tensor} equal parts."
        remedy = f"Set data.sequence to a multiple of {step}, or parallel.sequence_parallel=false."
        problems.append(Problem("parallel.sequence_parallel", reason, remedy))
    if layout.sequence_parallel and not getattr(draft.model.module, "partita_sequence_parallel", False):
        reason = f"{type(draft.model.module).__name__} reads the length of its activations, which would be cut."
        problems.append(Problem("parallel.sequence_parallel", reason, "Set parallel.sequence_parallel=false."))
    return problems


def _check_context(layout: Layout, draft: PlanDraft) -> list[Problem]:
    if layout.context == 1:
        return []
    problems, sequence = [], draft.config.data.sequence
    parts = layout.context * (2 if layout.context_method == "ring" else 1)
    if sequence % parts:
        why = " (causal work is balanced by halves)" if layout.context_method == "ring" else ""
        reason = f"{sequence} tokens can't be cut into {parts} equal parts{why}."
        problems.append(Problem("parallel.context", reason, f"Set data.sequence to a multiple of {parts}."))
    heads = getattr(getattr(draft.model.module, "sizes", None), "heads", None)
    if heads is None:
        reason = f"attention of {type(draft.model.module).__name__} can't see the tokens of other ranks."
        problems.append(Problem("parallel.context", reason, "Set parallel.context=1, or use model=gpt, llama or bert."))
    elif layout.context_method == "ulysses" and heads // layout.tensor % layout.context:
        mine = heads // layout.tensor
        legal = ", ".join(str(d) for d in range(1, mine + 1) if mine % d == 0)
        reason = f"{mine} heads can't be exchanged among {layout.context} ranks."
        problems.append(Problem("parallel.context", reason, f"Legal values: {legal}; any with parallel.context_method=ring."))
    return problems
