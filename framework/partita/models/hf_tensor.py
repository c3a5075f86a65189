"""Tensor parallel styles of Hugging Face models: their own plans, read and said in our words; a table for families that have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

# Theirs -> ours, where the words differ. A word that neither knows is refused when the plan is checked.
WORDS = {
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "partial",
}
BERT = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
# Of the base model, by its type. `packed`: as many equal blocks as follow.
WITHOUT_PLAN: dict[str, dict[str, str]] = {
    "gpt2": {"h.*.attn.c_attn": "packed:3", "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"},
    **dict.fromkeys(("bert", "roberta", "camembert", "xlm-roberta"), BERT),
}
SPLIT_SIZE, SHARES = "split_size", "num_key_value_groups"  # sizes that attention modules remember


def tensor_plan(inner: Any, prefix: str) -> dict[str, str]:
    """Module paths or patterns (with `prefix` before them) -> styles. Empty where neither the model nor the table has a plan."""
    base = inner.base_model_prefix
    config = inner.config.get_text_config()
    told: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or WITHOUT_PLAN.get(config.model_type, {})
    if not told:
        return {}
    plan = dict(_ends(inner))
    experts = [path for path, m in inner.named_modules() if getattr(m, "partita_experts", None)]
    for pattern, word in told.items():
        if any(fnmatchcase(path, f"{base}.{p}") for path in experts for p in (pattern, pattern.rpartition(".")[0])):
            continue  # the expert axis shares these out
        plan.update(_styles(inner, f"{base}.{pattern}", WORDS.get(word, word), config))
    return {prefix + path: style for path, style in plan.items()}


def _ends(inner: Any) -> Iterator[tuple[str, str]]:
    """The tables of tokens, which plans often leave out: whole logits are never needed for training."""
    for module, style in ((inner.get_input_embeddings(), "embedding"), (inner.get_output_embeddings(), "head")):
        path = next((p for p, m in inner.named_modules() if m is module), None)
        if path is not None:
            yield path, style


def _styles(inner: Any, pattern: str, word: str, config: Any) -> dict[str, str]:
    """One entry for all modules that fit, or one for each where they differ."""
    fitting = {path: m for path, m in inner.named_modules() if fnmatchcase(path, pattern) and "weight" in m._parameters}
    styles = {path: _style(path, module, word, config) for path, module in fitting.items()}
    if len(set(styles.values())) == 1:
        return {pattern: next(iter(styles.values()))}
    return styles or {pattern: word}


def _style(path: str, module: nn.Module, word: str, config: Any) -> str:
    weight = module._parameters["weight"]
    name, _, blocks = word.partition(":")
    if weight is None or weight.ndim != 2 or name not in ("colwise", "packed", "rowwise"):
        return word
    last = type(module).__name__ == "Conv1D"  # [in, out]
    size = weight.shape[1 if (name == "rowwise") != last else 0]
    if blocks:
        size //= int(blocks)
        word = f"packed:{','.join([str(size)] * int(blocks))}"
    grain = _grain(path, size, config)
    return f"{word}/{grain}" if grain > 1 else word


def _grain(path: str, size: int, config: Any) -> int:
    """Channels of a head, where the outputs (or inputs) of a module are those of heads; else 1."""
    if "attn" not in path and "attention" not in path:
        return 1
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    channels = getattr(config, "head_dim", None) or config.hidden_size // heads
    for count in (heads, kv_heads):
        if size == count * channels:
            return int(channels)
    return int(size // heads) if size % heads == 0 else 1


def localize(inner: Any, degree: int) -> None:
    """Tell modules that remember sizes of all heads how many are left on a rank."""
    config = inner.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for module in inner.modules():
        if isinstance(getattr(module, SPLIT_SIZE, None), int):
            module.split_size //= degree
        if isinstance(getattr(module, SHARES, None), int) and kv_heads < degree:
            module.num_key_value_groups = config.num_attention_heads // degree
