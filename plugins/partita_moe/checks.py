"""What keys of `moe` are refused, each with the reason and the remedy."""

from __future__ import annotations

from partita.errors import did_you_mean
from partita.plan.draft import PlanDraft
from partita.plan.plan import Plan
from partita.plan.problems import Problem
from partita_moe.config import MoeConfig
from partita_moe.routings import BALANCES, CHOOSERS, DROPS, ROUTINGS, TAKEN

OFF = "none"
WHOLE, CUT = TENSORS = "whole", "cut"  # experts where there is a tensor axis
CAUSAL = "causal"
# what a model with experts says itself
OWN = ("experts", "top_k", "every", "ffn", "shared", "groups", "group_top_k", "scale", "upcycle")
NO_CHOOSERS = ("groups", "group_top_k", "aux_weight", "bias_rate", "capacity")  # of no use where experts choose
NO_CHOICE = "only experts that choose their tokens look ahead."


def wrong(config: MoeConfig) -> list[Problem]:
    """Numbers that fit no routing; the plan is not needed to see it."""
    if config.name == OFF:
        return []
    if config.name == TAKEN:
        return _wrong_taken(config)
    if config.name not in ROUTINGS:
        near = did_you_mean(config.name, (OFF, TAKEN, *ROUTINGS)).capitalize()
        return [Problem("moe.name", f"{config.name!r} is no routing.", near)]
    problems = []

    def need(holds: bool, key: str, reason: str, remedy: str) -> None:
        if not holds:
            problems.append(Problem(f"moe.{key}", reason, remedy))

    top_k = config.top_k if config.top_k is not None else ROUTINGS[config.name].top_k
    need(config.experts >= 1, "experts", f"{config.experts} experts make no layer.", "Give a count of at least 1.")
    need(1 <= top_k <= max(1, config.experts), "top_k", f"{top_k} of {config.experts} experts.", f"Use 1 to {config.experts}.")
    need(config.every >= 1, "every", f"{config.every} is no distance.", "Use 1 for every block, 2 for every other one.")
    need(config.ffn is None or config.ffn >= 1, "ffn", f"{config.ffn} is no width.", "Give a positive width, or null.")
    problems += _wrong_choice(config)
    even = config.groups >= 1 and config.experts % config.groups == 0
    need(even, "groups", f"{config.experts} experts in {config.groups} groups.", "Use a divisor of moe.experts.")
    room = even and 1 <= config.group_top_k <= config.groups and top_k <= config.experts // config.groups * config.group_top_k
    if even and config.groups > 1:
        reason = f"{config.group_top_k} of {config.groups} groups hold too few experts for {top_k} choices, or don't exist."
        need(room, "group_top_k", reason, "Raise moe.group_top_k, or lower moe.top_k.")
    shared = config.shared is None or config.shared >= 0
    need(shared, "shared", f"{config.shared} shared experts.", "Use 0 or more.")
    sigmoid = ROUTINGS[config.name].gate == "sigmoid"
    need(config.scale is None or sigmoid, "scale", f"{config.name} does not scale its gates.", "Drop it, or use moe=deepseek.")
    row = ROUTINGS[config.name]
    alike = row.gate == "softmax_chosen" and not config.shared
    reason = "dense weights would compute something else with gates that don't sum to one, or beside shared experts."
    need(config.upcycle is None or alike, "upcycle", reason, "Use moe=mixtral or moe=gshard, without moe.shared.")
    problems += _wrong_chooser(config)
    need(0 <= config.jitter < 1, "jitter", f"{config.jitter} is no width around one.", "Use 0 or more, below 1; e.g. 0.01.")
    residual = ROUTINGS[config.name].residual and bool(config.shared)
    need(not residual, "shared", "the residual form has its dense half already.", "Drop moe.shared, or use another routing.")
    return problems


def _wrong_chooser(config: MoeConfig) -> list[Problem]:
    """Keys that are of no use where experts choose, or elsewhere."""
    if config.name not in CHOOSERS:
        return [Problem("moe.look_ahead", NO_CHOICE, "Drop it.")] if config.look_ahead else []
    plain, reason = MoeConfig(), "experts that choose their tokens all take as many: there is nothing to limit or to keep even."
    told = [key for key in NO_CHOOSERS if getattr(config, key) != getattr(plain, key)]
    told += ["balance"] if config.balance not in (None, "none") else []
    return [Problem(f"moe.{key}", reason, "Drop it, or use moe=mixtral.") for key in told]


def looks_ahead(plan: Plan, draft: PlanDraft) -> list[Problem]:
    """Where experts may not choose among the tokens of a sequence: they aren't all here, or later ones must not be seen."""
    config, layout = draft.config.moe, plan.layout
    if config.name not in CHOOSERS:
        return []
    problems = []
    reason = "experts choose among all tokens of a sequence, and a rank would have a part of them."
    if layout.context > 1:
        problems.append(Problem("parallel.context", reason, "Set parallel.context=1, or use moe=mixtral."))
    if layout.sequence_parallel:
        problems.append(Problem("parallel.sequence_parallel", reason, "Set it to false, or use moe=mixtral."))
    causal = getattr(draft.model.module, "partita_loss", CAUSAL) == CAUSAL
    if causal and not config.look_ahead:
        reason = "experts that choose see later tokens of a sequence, which a causal model must not, and has not when it writes."
        remedy = "Use moe=mixtral, a masked model (model=bert), or moe.look_ahead=true to do it all the same."
        problems.append(Problem("moe.name", reason, remedy))
    if config.look_ahead and not causal:
        problems.append(Problem("moe.look_ahead", "a masked model sees the whole sequence anyway.", "Drop it."))
    return problems


def _wrong_choice(config: MoeConfig) -> list[Problem]:
    """Words that are none of those that a key takes, and a capacity that is none."""
    problems = []
    if config.balance is not None and config.balance not in BALANCES:
        near = did_you_mean(config.balance, BALANCES).capitalize()
        problems.append(Problem("moe.balance", f"{config.balance!r} balances nothing.", near))
    if config.capacity is not None and config.capacity <= 0:
        problems.append(Problem("moe.capacity", f"{config.capacity} is no room.", "Use 1.0 or more, or null."))
    if config.tensor not in TENSORS:
        near = did_you_mean(config.tensor, TENSORS).capitalize()
        problems.append(Problem("moe.tensor", f"{config.tensor!r} says not whether experts are cut.", near))
    if config.drop not in DROPS:
        problems.append(Problem("moe.drop", f"{config.drop!r} drops nobody.", did_you_mean(config.drop, DROPS).capitalize()))
    elif config.drop != MoeConfig().drop and config.capacity is None:
        reason = "without moe.capacity experts have room for all, and nobody is dropped."
        problems.append(Problem("moe.drop", reason, "Set moe.capacity, e.g. 1.25, or drop the key."))
    return problems


def _wrong_taken(config: MoeConfig) -> list[Problem]:
    plain = MoeConfig()
    reason, remedy = f"is the model's own with moe.name={TAKEN}.", "Drop it; the config of the model (model.options) says it."
    problems = [Problem(f"moe.{k}", reason, remedy) for k in OWN if getattr(config, k) != getattr(plain, k)]
    if config.jitter:
        reason = "blocks of a Hugging Face model take no noise, so ranks would not draw the same numbers."
        problems.append(Problem("moe.jitter", reason, "Drop it, or use model=gpt, llama or bert."))
    return [*problems, *_wrong_chooser(config), *_wrong_choice(config)]
