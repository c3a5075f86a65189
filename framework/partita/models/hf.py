"""Any causal or masked language model of Hugging Face transformers as a model of Partita (`model=hf`)."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.errors import ConfigError, PartitaError
from partita.models.common import document_mask
from partita.models.hf_config import CAUSAL, import_transformers, objective, read_config
from partita.models.hf_tensor import localize, tensor_plan
from partita.models.hf_weights import Drawer, StoredWeights, has_weights
from partita.models.noise import Noise
from partita.state.parts import Part

PREFIX = "inner."  # of the names of all parameters: the model is a part of its adapter
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt")

Source = Callable[[str, tuple[int, ...]], torch.Tensor]


class HfModel(nn.Module):
    """Adapter: our arguments to theirs, logits back.

    config: of transformers. weights: makes the source of stored ones; None: they are drawn.
    Units are the members of the largest ModuleList.
    """

    def __init__(self, config: Any, weights: Callable[[Any], Source] | None = None) -> None:
        super().__init__()
        self.inner = build_inner(config)
        self.partita_loss = objective(config)
        self.partita_weights = self._stored = None if weights is None else _Renamed(weights(self.inner))
        self._drawer = Drawer(lambda: build_inner(config))
        self._offset = _position_offset(self.inner)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.context = longest - self._offset if longest else None
        self._matrix_weights = _matrix_weights(self.inner)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """input_ids, positions, documents: int64 [B, T] -> logits [B, T, vocab].

        Raises PartitaError for noise, which has no use here.
        """
        if noise is not None:
            raise PartitaError("a Hugging Face model takes no dropout noise. Set model.dropout=0.")
        more: dict[str, Any] = {}
        if positions is not None:
            more["position_ids"] = positions + self._offset
        if documents is not None:
            more["attention_mask"] = document_mask(documents, causal=self.partita_loss == CAUSAL)
        logits: torch.Tensor = self.inner(input_ids=input_ids, **more).logits
        return logits

    def init_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill one whole parameter in place, by the model's own rules and the generator's seed."""
        self._drawer.draw(name.removeprefix(PREFIX), tensor, generator)

    def init_buffers(self, device: torch.device) -> None:
        """Give buffers that stand on meta their stored values, or those that the model's constructors compute."""
        for name, module in self.inner.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    saved = self._stored is not None and key not in module._non_persistent_buffers_set
                    value = self._stored.buffer(f"{name}.{key}") if self._stored is not None and saved else None
                    if value is None:
                        value = self._drawer.model.get_submodule(name)._buffers.get(key)
                    if value is not None:  # else it is of a part that somebody else has put there, and fills
                        module._buffers[key] = value.to(device, buffer.dtype)

    def partita_tensor_plan(self) -> dict[str, str]:
        """The model's own plan, or that of its family; empty where there is none."""
        return tensor_plan(self.inner, PREFIX)

    def partita_localize(self, degree: int) -> None:
        """Called when matrices have been cut over `degree` ranks."""
        localize(self.inner, degree)

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward: 6 for each weight that a token meets, and 12 x layers x width x sequence for attention."""
        text = self.inner.config.get_text_config()
        return 6.0 * self._matrix_weights + 12.0 * text.num_hidden_layers * text.hidden_size * sequence


def build_inner(config: Any) -> Any:
    """The transformers model of a config, on the default device. Fused attention where the model has it."""
    transformers = import_transformers()
    auto = transformers.AutoModelForCausalLM if objective(config) == CAUSAL else transformers.AutoModelForMaskedLM
    return auto.from_config(config)


class _Renamed:
    """A source of the inner model's weights by the adapter's names."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._source(name.removeprefix(PREFIX), shape)
        return tensor

    def part(self, name: str, part: Part) -> torch.Tensor | None:
        """A part alone, where the source can read it."""
        reader = getattr(self._source, "part", None)
        found: torch.Tensor | None = reader(name.removeprefix(PREFIX), part) if reader is not None else None
        return found

    def buffer(self, name: str) -> torch.Tensor | None:
        """A stored buffer, by the inner model's name."""
        found: torch.Tensor | None = self._source.buffer(name)
        return found


def _position_offset(inner: nn.Module) -> int:
    """RoBERTa and its kin count positions from the one after the padding's."""
    for name, module in inner.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1  # type: ignore[arg-type]
    return 0


def _matrix_weights(inner: Any) -> float:
    """Weights that a token is multiplied with: no tables that are only looked up, and of experts those that it is sent to."""
    tables = {id(m.weight) for m in inner.modules() if isinstance(m, nn.Embedding)}
    used = {id(p) for m in inner.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    text = inner.config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    share = getattr(text, "num_experts_per_tok", 1) / experts if experts else 1.0
    shares = {2: 1.0, 3: share}
    return sum(p.numel() * shares.get(p.ndim, 0.0) for p in inner.parameters() if id(p) not in tables or id(p) in used)


def _check_packing(inner: Any) -> None:
    """Raise ConfigError where a model would let packed documents see each other."""
    takes = inspect.signature(inner.forward).parameters
    name, text = type(inner).__name__, inner.config.get_text_config()
    reason = ""
    if "position_ids" not in takes or "attention_mask" not in takes:
        reason = "takes no positions or no mask"
    elif inner.config._attn_implementation != "sdpa":
        reason = f"has no fused attention with a mask (it runs {inner.config._attn_implementation!r})"
    elif getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        reason = "has a sliding window, which a mask of documents would replace"
    if reason:
        raise ConfigError(f"data.pack: {name} {reason}, so documents could not be kept apart\n    -> data.pack=false")


def _weights(model: Any) -> Callable[[Any], Source] | None:
    """Where initial weights come from, as `model.weights` says; None: they are drawn."""
    if model.weights not in ("auto", "load", "random"):
        raise ConfigError(f"model.weights: {model.weights!r} is none of auto, load, random")
    if model.weights == "random" or (model.path is None and model.weights == "auto"):
        return None
    folder = Path(model.path).expanduser() if model.path is not None else None
    if folder is not None and has_weights(folder):
        return lambda inner: StoredWeights(folder, inner)
    if model.weights == "load":
        raise ConfigError(
            f"model.weights: no safetensors in {folder or 'model.path, which is not set'}\n    -> model.weights=random"
        )
    return None


def make_hf(config: Any, vocab: int) -> HfModel:
    """Builder of the slot `model`. vocab: entries that the tokenizer needs; a folder's model keeps its own number.

    Raises ConfigError for what transformers doesn't know, what the corpus doesn't fit, and weights that are missing.
    """
    model = HfModel(read_config(config.model, vocab, config.data.sequence), _weights(config.model))
    if config.data.pack:
        _check_packing(model.inner)
    return model


def export_inner(model: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write weights by Partita's names, with config and the tokenizer files of `model.path`, as `save_pretrained` does."""
    whole = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    with torch.device("meta"):
        inner = build_inner(read_config(model, model.vocab or 1, model.context))
        table = next(n for n, p in inner.named_parameters() if p is inner.get_input_embeddings().weight)
        if len(whole[table]) != len(inner.get_input_embeddings().weight):
            inner = build_inner(read_config(model, len(whole[table]), model.context))
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        first = next(n for n, p in inner.named_parameters() if p is parameter)
        whole[name] = whole[first]
    inner.save_pretrained(folder, state_dict={n: whole[n] for n in inner.state_dict() if n in whole})
    for file in TOKENIZER_FILES if model.path is not None else ():
        stored = Path(model.path).expanduser() / file
        if stored.is_file():
            shutil.copy(stored, folder / file)
