"""Initial weights of Hugging Face models, one whole parameter at a time: from safetensors, or drawn by the model's own rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.errors import ConfigError, PartitaError, did_you_mean
from partita.models.hf_experts import Places, expert_places, old_names, read_experts
from partita.state.parts import Part, Range, select

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RENEW = 4 << 20  # bytes that are read from open files until they are opened anew
EXPERTS_NDIM = 3  # of weights that stack experts


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside have parameters without memory, and real buffers: constructors compute those, so they need no rule."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Drawer:
    """Draws parameters by the model's `_init_weights`, each from a generator of its own.

    build: makes the model. It is called once, when first needed: the model that is trained may be cut or transformed by then.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The model as its authors made it: parameters on meta, buffers real."""
        if self._model is None:
            with meta_parameters():
                self._model = self._build()
        return self._model

    @torch.no_grad()
    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the whole parameter `name` in place. Raises PartitaError where the model has no rule for it."""
        tensor.fill_(torch.nan)
        with self._in_place(name, tensor), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator.initial_seed())
            for owner, module in self._way_up(name):
                owner._init_weights(module)
        if tensor.isnan().any():
            raise PartitaError(
                f"{type(self.model).__name__} has no initial values for {name!r}. Give weights: model.path, model.weights=load."
            )

    @contextmanager
    def _in_place(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        """The parameter under all of its names is `tensor`; all others stay on meta, where writing costs and changes nothing."""
        path, _, attribute = name.rpartition(".")
        old = self.model.get_submodule(path)._parameters[attribute]
        holders = [(m, key) for m in self.model.modules() for key, p in m._parameters.items() if p is old]
        new = nn.Parameter(tensor, requires_grad=False)
        for module, key in holders:
            module._parameters[key] = new
        try:
            yield
        finally:
            for module, key in holders:
                module._parameters[key] = old

    def _way_up(self, name: str) -> list[tuple[Any, nn.Module]]:
        """(who initialises, module) from the module that holds a parameter to the root: parents' rules come last."""
        owner, module = self.model, self.model
        way = [(owner, module)]
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
            owner = module if hasattr(module, "_init_weights") else owner
            way.append((owner, module))
        return way[::-1]


class StoredWeights:
    """Reads parameters of `model` (on meta, names and shapes are what counts) from the safetensors of a folder, by name.

    Files may leave out the prefix of the base model or have it, and hold a tied weight under any of its names. Experts that the model
    stacks may lie there one by one. Where transformers stores a model in yet another form than it runs it in, the whole model is read
    once through transformers.
    Raises ConfigError for parameters that are missing or have another shape.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        self._folder, self._model = folder, model
        self._files = _files(folder)
        self._open: dict[str, Any] = {}
        self._mapped = 0  # bytes read since files were opened
        self._places = {name: self._find(names) for name, names in _names(model).items()}
        self._whole: dict[str, torch.Tensor] | None = None
        self._experts = {name: found for name in self._places if (found := self._find_experts(name)) is not None}
        missing = [name for name, place in self._places.items() if place is None and name not in self._experts]
        self._converted = bool(missing) and _has_conversion(model)
        if not self._converted:
            self._check(missing)

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole parameter, in the dtype of the file. Its shape is checked by whom it is given to."""
        if self._converted:
            return self._read_whole()[name]
        if name in self._experts:
            return read_experts(self._experts[name], lambda place: self._handle(place).get_tensor(place))
        place = self._places[name]
        if place is None:
            raise PartitaError(f"{self._folder} has no weights for {name!r}")
        return self._noted(self._handle(place).get_tensor(place))

    def part(self, name: str, part: Part) -> torch.Tensor | None:
        """A part of a parameter, of which no more is read; None where only the whole one can be had."""
        (dim, ranges), *rest = part.cuts
        if not self._converted and dim == 0 and name in self._experts:
            wanted = [e for lo, hi in ranges for e in self._experts[name][lo:hi]]
            return _taken(read_experts(wanted, lambda place: self._handle(place).get_tensor(place)), rest) if wanted else None
        place = None if self._converted else self._places[name]
        if place is None:
            return None
        stored = self._handle(place).get_slice(place)
        if tuple(stored.get_shape()) != part.shape:
            return None  # the whole one is read and refused
        pieces = [stored[(*(slice(None),) * dim, slice(lo, hi))] for lo, hi in ranges]
        return self._noted(_taken(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim), rest))

    def buffer(self, name: str) -> torch.Tensor | None:
        """A buffer, in the dtype of the file; None where the folder has none of that name."""
        place = self._find([name])
        if place is not None:
            return self._noted(self._handle(place).get_tensor(place))
        return self._read_whole().get(name) if self._converted else None

    def _spellings(self, name: str) -> tuple[str, ...]:
        prefix = f"{self._model.base_model_prefix}."
        return (*old_names(name), *old_names(name.removeprefix(prefix)), *old_names(prefix + name))

    def _find_experts(self, name: str) -> Places | None:
        if self._places[name] is not None or self._model.get_parameter(name).ndim != EXPERTS_NDIM:
            return None
        return expert_places(self._spellings(name), len(self._model.get_parameter(name)), self._files)

    def _find(self, names: list[str]) -> str | None:
        for name in names:
            spellings = self._spellings(name)
            old = (
                s.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for s in spellings
            )
            found = next((s for s in (*spellings, *old) if s in self._files), None)
            if found is not None:
                return found
        return None

    def _check(self, missing: list[str]) -> None:
        if missing:
            lines = [f"  {n}: {did_you_mean(n, self._files)}" for n in missing[:5]]
            raise ConfigError(
                f"model.path: {self._folder} lacks {len(missing)} weights of {type(self._model).__name__}\n"
                + "\n".join(lines)
                + "\n    -> the folder of a whole model, or model.weights=random"
            )
        for name, place in self._places.items():
            wanted = tuple(self._model.get_parameter(name).shape)
            if place is not None:
                self._check_shape(place, wanted)
                continue
            experts = self._experts[name]
            for stored in (s for expert in experts for s in expert):
                self._check_shape(stored, (wanted[1] // len(experts[0]), wanted[2]))

    def _check_shape(self, place: str, wanted: tuple[int, ...]) -> None:
        stored = tuple(self._handle(place).get_slice(place).get_shape())
        if stored != wanted:
            raise ConfigError(
                f"model.path: {place} has shape {stored} in {self._folder}, the config makes it {wanted}\n"
                "    -> take back model.options, or model.weights=random"
            )

    def _handle(self, place: str) -> Any:
        from safetensors import safe_open

        file = self._files[place]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt", device="cpu")
        return self._open[file]

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pages of a mapped file stay in memory as long as it is open: it is opened anew when many have been read."""
        self._mapped += tensor.nbytes
        if self._mapped > RENEW:
            self._open, self._mapped = {}, 0  # the tensor keeps its own
        return tensor

    def _read_whole(self) -> dict[str, torch.Tensor]:
        if self._whole is None:
            model, info = type(self._model).from_pretrained(
                self._folder,
                config=self._model.config,
                local_files_only=True,
                use_safetensors=True,
                dtype="auto",
                output_loading_info=True,
            )
            if info["missing_keys"] or info["mismatched_keys"]:
                self._check(sorted(info["missing_keys"]) or [str(key) for key in info["mismatched_keys"]])
            self._whole = dict(model.named_parameters()) | dict(model.named_buffers())
        return {name: p.detach() for name, p in self._whole.items()}


def _taken(x: torch.Tensor, cuts: list[tuple[int, tuple[Range, ...]]]) -> torch.Tensor:
    """What cuts along further dimensions leave."""
    for dim, ranges in cuts:
        x = select(x, dim, ranges)
    return x


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors. Raises ConfigError for weights in a pickle, which are never read."""
    if (folder / WHOLE).is_file() or (folder / INDEX).is_file():
        return True
    pickles = sorted(p.name for p in folder.glob("pytorch_model*.bin*"))
    if pickles:
        raise ConfigError(
            f"model.path: {folder} has its weights in {pickles[0]}, and no pickle is read\n"
            "    -> save them as safetensors with save_pretrained, or model.weights=random"
        )
    return False


def _files(folder: Path) -> dict[str, str]:
    """Name of a stored tensor -> name of its file."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        places: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        lost = sorted({file for file in places.values() if not (folder / file).is_file()})
        if lost:
            raise ConfigError(f"model.path: {folder} lacks {', '.join(lost[:3])}, which its index names\n    -> a complete copy")
        return places
    with safe_open(folder / WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), WHOLE)


def _names(model: nn.Module) -> dict[str, list[str]]:
    """First name of each parameter -> all of its names."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in by_id.values()}


def _has_conversion(model: Any) -> bool:
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # this version of transformers stores what it runs
        return False
    return get_checkpoint_conversion_mapping(model.config.model_type) is not None
