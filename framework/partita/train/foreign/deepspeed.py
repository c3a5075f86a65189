"""DeepSpeed checkpoints of ZeRO 0 to 3, as whole float32 weights and optimizer states.

Layout of the files (DeepSpeed 0.10 to 0.19): `mp_rank_00_model_states.pt`, or for stage 3 one for each rank, has the module's state
dict, the shapes of trainable parameters by group, and frozen parameters; `*zero_pp_rank_R_mp_rank_00_optim_states.pt` has this rank's
part of the flat float32 masters and moments. Stages 1 and 2 cut a whole group into equal parts; stage 3 cuts each parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError
from partita.train.foreign.source import Source, Weights
from partita.train.foreign.unpickle import read_pickled

OPTIMIZER = re.compile(r"\A(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
MODEL = re.compile(r"\A(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt\Z")
Flat = dict[str, list[torch.Tensor]]  # kind of state ("" for weights) -> flat tensors of one rank, by group


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint, or one with several and a file `latest`."""
    return any(MODEL.match(p.name) for p in _tag(path).glob("*_states.pt"))


def _tag(path: Path) -> Path:
    """The folder of one checkpoint: the one that `latest` names, where there is such a file."""
    latest = path / "latest"
    if latest.is_file():
        name = latest.read_text(errors="replace").strip()
        if name and "/" not in name and "\0" not in name and (path / name).is_dir():
            return path / name
    return path


def read_deepspeed(path: Path) -> Source:
    """Read all of it. Raises CheckpointError where files are missing, damaged, or of a kind that can't be put together."""
    folder = _tag(path)
    models = _files(folder, MODEL)
    heads = [read_pickled(p) for p in models]
    parts = [read_pickled(p) for p in _files(folder, OPTIMIZER)]
    if list(folder.glob("*expert_*_states.pt")):
        raise CheckpointError(f"{folder} holds experts in files of their own, which are not understood; export it by DeepSpeed")
    try:
        return _assemble(folder, heads, parts)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} is not as DeepSpeed's ZeRO 0 to 3 writes it: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The matching files in the order of ranks; none may be missing in between."""
    found = {}
    for path in folder.iterdir():
        match = pattern.match(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise CheckpointError(f"{path} belongs to tensor or pipeline ranks; only data-parallel checkpoints are understood")
        found[int(match[1] or 0)] = path
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise CheckpointError(f"{folder}: the file of rank {missing[0]} is missing beside {found[max(found)].name}")
    return [found[rank] for rank in sorted(found)]


def _assemble(folder: Path, heads: list[Any], parts: list[Any]) -> Source:
    head = heads[0]
    module = {_plain(k): v for k, v in (head.get("module") or {}).items() if isinstance(v, torch.Tensor)}
    names = {_plain(n) for n in head.get("buffer_names") or ()}
    shared = {_plain(a): _plain(b) for a, b in (head.get("shared_params") or {}).items()}
    source = Source(
        "DeepSpeed", {}, buffers={n: t for n, t in module.items() if n in names}, step=int(head.get("global_steps") or 0)
    )
    if not parts:
        source.what = "DeepSpeed, no ZeRO"
        source.weights = {n: t.float() for n, t in module.items() if n not in names and n not in shared}
        source.notes.append("weights are those of the module; optimizer states are only taken from ZeRO 1 to 3")
        return source
    states = [p["optimizer_state_dict"] for p in parts]
    stage = int(_number(states[0]["zero_stage"]))
    source.what = f"DeepSpeed, ZeRO-{stage}"
    groups = [{_plain(n): tuple(s) for n, s in g.items()} for g in _list(head["param_shapes"])]
    flats = [_flat3(s) if stage == 3 else _flat12(s) for s in states]
    _check_world(folder, states[0], len(parts))
    join = _join3 if stage == 3 else _join12
    for kind in flats[0]:
        whole = join(groups, [f[kind] for f in flats])
        if kind:
            source.states[kind] = whole
        else:
            source.weights = whole
    source.weights |= _frozen(heads, stage, len(parts))
    if stage < 3:  # what is not trained may stand in the module alone
        rest = {n: t.float() for n, t in module.items() if n not in names and n not in shared and n not in source.weights}
        source.weights |= rest
    source.step = source.step or _updates(states[0])
    for alias in shared:
        source.weights.pop(alias, None)
    return source


def _plain(name: str) -> str:
    for prefix in ("module.", "_orig_mod."):
        name = name.removeprefix(prefix)
    return name


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _number(value: Any) -> Any:
    """An enumeration's value: its class is not imported, so it is a shell around what it was made of."""
    return value.arguments[0] if getattr(value, "arguments", ()) else value


def _check_world(folder: Path, state: Mapping[str, Any], files: int) -> None:
    count = _list(_number(state["partition_count"]))[0]
    if int(count) != files:
        raise CheckpointError(f"{folder} was written by {count} ranks, and the files of {files} are there")


def _flat12(state: Mapping[str, Any]) -> Flat:
    masters = [t.float().reshape(-1) for t in state["single_partition_of_fp32_groups"]]
    base = state["base_optimizer_state"]
    rows = base if isinstance(base, list) else [base["state"].get(i, {}) for i in range(len(masters))]
    if any(p for group in state.get("param_alignment_paddings") or () for p in group):
        raise CheckpointError(
            "parameters are aligned with gaps in between, which is not understood; export by DeepSpeed's zero_to_fp32"
        )
    return {"": masters, **_moments(rows)}


def _flat3(state: Mapping[str, Any]) -> Flat:
    masters = [t.float().reshape(-1) for t in _list(state["fp32_flat_groups"])]
    rows = [state["optimizer_state_dict"]["state"].get(i, {}) for i in range(len(masters))]
    flat = {"": masters, **_moments(rows)}
    return {kind: [torch.cat(values)] for kind, values in flat.items()}  # sub-groups of the whole model, one after the other


def _moments(rows: Sequence[Any]) -> Flat:
    """States with a value for each element, by name. They may keep the padding behind the last rank's part that masters have not."""
    kinds = [k for k, v in rows[0].items() if isinstance(v, torch.Tensor) and v.ndim and k != "step"] if rows else []
    return {kind: [row[kind].float().reshape(-1) for row in rows] for kind in kinds}


def _updates(state: Mapping[str, Any]) -> int:
    rows: Iterable[Any] = (state.get("base_optimizer_state") or state.get("optimizer_state_dict") or {}).get("state", {}).values()
    return max((int(row["step"]) for row in rows if "step" in row), default=0)


def _join12(groups: list[dict[str, tuple[int, ...]]], ranks: list[list[torch.Tensor]]) -> Weights:
    out = {}
    for i, group in enumerate(groups):
        flat, at = torch.cat([r[i] for r in ranks]), 0
        for name, shape in group.items():
            size = math.prod(shape)
            out[name] = flat[at : at + size].view(shape).clone()
            at += size
        if at > flat.numel():
            raise CheckpointError(f"parameter group {i} has {flat.numel():,} elements, and its parameters {at:,}")
    return out


def _join3(groups: list[dict[str, tuple[int, ...]]], ranks: list[list[torch.Tensor]]) -> Weights:
    out, at = {}, 0
    for name, shape in [item for g in groups for item in g.items()]:
        size = math.prod(shape)
        share = -(-size // len(ranks))
        out[name] = torch.cat([r[0][at : at + share] for r in ranks])[:size].view(shape).clone()
        at += share
    if at > ranks[0][0].numel():
        raise CheckpointError(f"each rank has {ranks[0][0].numel():,} elements, and its parameters {at:,}")
    return out


def _frozen(heads: list[Any], stage: int, world: int) -> Weights:
    shapes = heads[0].get("frozen_param_shapes") or {}
    out = {}
    for name, shape in shapes.items():
        parts = [h["frozen_param_fragments"][name].float().reshape(-1) for h in (heads if stage == 3 else heads[:1])]
        if stage == 3 and len(parts) != world:
            raise CheckpointError(f"{name} is frozen and cut over {world} ranks; the model files of {len(parts)} are there")
        out[_plain(name)] = torch.cat(parts)[: math.prod(shape)].view(tuple(shape)).clone()
    return out
