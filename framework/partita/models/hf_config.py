"""The config of a Hugging Face model: from a folder, or from `model.options.model_type` and the sizes of the config node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partita.errors import ConfigError, did_you_mean

CAUSAL, MASKED = "causal", "masked"


def import_transformers() -> Any:
    """The library, imported when a model needs it. Raises ConfigError with the command that installs it."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"model.name: hf needs transformers ({error})\n    -> pip install 'partita[hf]'") from error
    return transformers


def read_config(model: Any, vocab: int, sequence: int) -> Any:
    """The transformers config for the config node `model`. vocab: entries that the tokenizer needs. sequence: tokens of a sample.

    All dropout is 0 in it: transformers draws it from torch's generator, where it would depend on the layout of ranks.
    Raises ConfigError for what transformers doesn't know or what the corpus doesn't fit.
    """
    if model.dropout:
        raise ConfigError(
            "model.dropout: dropout inside a Hugging Face model would depend on the number of ranks\n    -> model.dropout=0"
        )
    config = _from_folder(model) if model.path is not None else _from_sizes(model, vocab, sequence)
    _check_fit(config, vocab, sequence)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _from_folder(model: Any) -> Any:
    path = Path(model.path).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: no config.json in {path}\n    -> a folder that save_pretrained or `partita export` wrote")
    load = import_transformers().AutoConfig.from_pretrained
    try:
        config = load(path, local_files_only=True, trust_remote_code=False)
        _check_options(model.options, config)
        return load(path, local_files_only=True, trust_remote_code=False, **model.options)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path: transformers can't read {path / 'config.json'}: {error}") from error


def _from_sizes(model: Any, vocab: int, sequence: int) -> Any:
    transformers = import_transformers()
    options = dict(model.options)
    kind = options.pop("model_type", None)
    if kind is None:
        raise ConfigError(
            "model.path: hf needs a folder, or the type of a model\n    -> model.path=FOLDER or '+model.options.model_type=llama'"
        )
    if kind not in transformers.CONFIG_MAPPING:
        near = did_you_mean(kind, transformers.CONFIG_MAPPING.keys())
        raise ConfigError(f"model.options.model_type: transformers has no {kind!r}\n    -> {near}")
    default = transformers.CONFIG_MAPPING[kind]()
    _check_options(options, default)
    known = _known(default)
    config = transformers.AutoConfig.for_model(kind, **_sizes(model, vocab, sequence, known) | options)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(config, key, None), int) and getattr(config, key) >= vocab:
            setattr(config, key, None)
    return config


def _sizes(model: Any, vocab: int, sequence: int, known: set[str]) -> dict[str, Any]:
    """Our sizes under their names. Raises ConfigError where the type of model has none of that meaning."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.context or sequence,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }
    if "num_key_value_heads" in known or model.kv_heads:
        sizes["num_key_value_heads"] = model.kv_heads or model.heads
    if model.ffn:
        sizes["n_inner" if "n_inner" in known else "intermediate_size"] = model.ffn
    required = {
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    }
    lacking = sorted((required & set(sizes)) - known)
    if lacking:
        raise ConfigError(
            f"model.options.model_type: this model has no {', '.join(lacking)}\n    -> write a config.json, and model.path=FOLDER"
        )
    return {key: value for key, value in sizes.items() if key in known or key == "tie_word_embeddings"}


def _known(config: Any) -> set[str]:
    return set(config.to_dict()) | set(config.attribute_map) | {"tie_word_embeddings", "architectures"}


def _check_options(options: dict[str, Any], config: Any) -> None:
    """transformers takes any key; a mistyped one would have no effect."""
    known = _known(config)
    wrong = [key for key in options if key not in known]
    if wrong:
        lines = [
            f"model.options.{key}: {config.model_type} has no such setting\n    -> {did_you_mean(key, known)}" for key in wrong
        ]
        raise ConfigError("\n".join(lines))


def _check_fit(config: Any, vocab: int, sequence: int) -> None:
    text = config.get_text_config()
    if text.vocab_size < vocab:
        raise ConfigError(
            f"model.path: the model has {text.vocab_size} token ids and the tokenizer {vocab}\n"
            "    -> data.tokenizer=FOLDER of the model, or '+model.options.vocab_size=...' with model.weights=random"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and 0 < longest < sequence:
        raise ConfigError(
            f"data.sequence: {sequence} tokens, but the model has {longest} positions\n    -> data.sequence={longest} or less"
        )


def objective(config: Any) -> str:
    """`causal` or `masked`: by the architecture that the config names, else by what transformers has for its type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = config.model_type
    named = (config.architectures or [""])[0]
    masked, causal = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    looks_back = getattr(config, "is_decoder", False)
    if masked and "ForMaskedLM" in named:
        return MASKED
    if causal and named.endswith(("ForCausalLM", "LMHeadModel")):
        if masked and not looks_back and hasattr(config, "is_decoder"):
            raise ConfigError(f"model.path: {named} would see the tokens it predicts\n    -> '+model.options.is_decoder=true'")
        return CAUSAL
    if masked and not looks_back:
        return MASKED
    if causal:
        return CAUSAL
    raise ConfigError(
        f"model.path: {kind!r} is neither a causal nor a masked language model in transformers\n    -> another model"
    )
