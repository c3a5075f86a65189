"""Any causal or masked language model of transformers, from a folder with config.json and, where it has them, weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.errors import ConfigError, PartitaError
from partita.models.noise import Noise

PREFIX = "inner."  # of parameter names: the model stands inside ours


def load_config(path: str | None, options: Mapping[str, Any]) -> Any:
    """transformers' config of a local folder, with `options` on top. Raises ConfigError for options that it doesn't have."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError("model.name: model=hf needs transformers\n    -> pip install 'partita[hf]'") from error
    if path is None or not (Path(path) / "config.json").exists():
        raise ConfigError(f"model.path: {path!r} holds no config.json\n    -> give the folder of a model; nothing is downloaded")
    described = AutoConfig.from_pretrained(path, local_files_only=True)
    for key, value in options.items():
        if not hasattr(described, key):
            raise ConfigError(f"model.options.{key}: {type(described).__name__} has no such value\n    -> see {path}/config.json")
        setattr(described, key, value)
    return described


class HuggingFace(nn.Module):
    """A transformers model behind the signature of the reference models. Input [B, T] token ids, output [B, T, vocab] logits."""

    def __init__(self, inner: Any, causal: bool, folder: Path | None) -> None:
        super().__init__()
        self.inner, self._causal, self._folder = inner, causal, folder
        self.partita_loss = "causal" if causal else "masked"
        self.context = getattr(inner.config, "max_position_embeddings", None)
        if folder is not None:
            self.partita_weights = self._stored

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """positions, documents: [B, T] for packed samples. noise: unused; dropout is that of the model's own config."""
        extra: dict[str, Any] = {}
        if positions is not None:
            extra["position_ids"] = positions
        if documents is not None:
            extra["attention_mask"] = self._mask(documents)
        logits: torch.Tensor = self.inner(input_ids=input_ids, **extra).logits
        return logits

    def _mask(self, documents: torch.Tensor) -> torch.Tensor:
        """[B, 1, T, T], added to attention scores: 0 where a token may look, the lowest number elsewhere."""
        see = documents[:, :, None] == documents[:, None, :]
        if self._causal:
            see = see.tril()
        dtype = self.inner.dtype
        return torch.zeros_like(see, dtype=dtype).masked_fill(~see, torch.finfo(dtype).min)[:, None]

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """By the model's own rule for the module that holds the parameter, with random numbers of `generator`."""
        path, _, attribute = name.rpartition(".")
        module = copy.deepcopy(self.get_submodule(path)).to_empty(device="cpu").float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            self.inner._init_weights(module)
        tensor.copy_(module.get_parameter(attribute).detach())

    def init_buffers(self, device: torch.device) -> None:
        """Fill buffers that were made on the meta device (rotary tables, position numbers) by the model's own rule."""
        for module in self.inner.modules():
            if not any(b is not None and b.is_meta for b in module._buffers.values()):
                continue
            fresh = copy.deepcopy(module).to_empty(device=device)
            self.inner._init_weights(fresh)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = fresh._buffers[key]

    def _stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One weight of the folder, read by itself. Raises PartitaError where no file has it."""
        from safetensors import safe_open

        assert self._folder is not None
        base = self.inner.base_model_prefix + "."
        bare = name.removeprefix(PREFIX)
        where = _weight_files(self._folder)
        for candidate in (bare, bare.removeprefix(base), base + bare):
            if candidate in where:
                with safe_open(str(where[candidate]), framework="pt") as file:
                    tensor: torch.Tensor = file.get_tensor(candidate)
                return tensor
        raise PartitaError(
            f"{self._folder} has no weight {bare!r} of shape {shape}. model.weights=random starts from random weights."
        )


def _weight_files(folder: Path) -> dict[str, Path]:
    """Name of each weight -> its file."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {k: folder / v for k, v in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        return {}
    with safe_open(str(single), framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def make_hf(config: Any, vocab: int) -> HuggingFace:
    """Builder of the slot `model`. Raises ConfigError for a folder, an architecture or a vocabulary that doesn't fit."""
    m = config.model
    described = load_config(m.path, m.options)
    if vocab > described.vocab_size:
        raise ConfigError(
            f"data.tokenizer: it has {vocab} tokens, the model {described.vocab_size}\n    -> use the model's own: data.tokenizer={m.path}"
        )
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

    names = described.architectures or []
    causal = not any("MaskedLM" in n for n in names) and type(described) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    try:
        inner = auto.from_config(described, attn_implementation="sdpa")
    except ValueError as error:
        raise ConfigError(f"model.path: {m.path}: {error}\n    -> give a causal or masked language model") from error
    folder = Path(m.path)
    stored = bool(_weight_files(folder))
    if m.weights == "load" and not stored:
        raise ConfigError(f"model.weights: load, but {folder} holds no safetensors\n    -> model.weights=random")
    return HuggingFace(inner, causal, folder if stored and m.weights != "random" else None)
