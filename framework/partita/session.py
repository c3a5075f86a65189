"""A model of your own under a plan, in a loop of your own.

    session = partita.prepare(model, ["+strategy=zero3", "optimizer.lr=1e-3"])
    for batch in batches:                         # this rank's samples
        result = session.step(batch, loss_fn)     # loss_fn(model, batch) -> mean loss
    whole = session.parameter("blocks.0.weight")

The finer calls are `session.model(...)` (or `forward`), `backward(loss)`, and `step()` without arguments. Nothing here is global: several
sessions live in one process, each with a plan, states and optimizer of its own. All calls are collective over the ranks of the process
group that is there (or that torchrun's variables describe); without one there is one rank.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partita.config.compose import compose_config, registry_for
from partita.config.plain import to_plain
from partita.errors import ConfigError, PartitaError
from partita.plan.make import Planned, make_plan
from partita.runtime.collectives import CollectiveContext
from partita.runtime.device import Device
from partita.runtime.joining import adopt, joined
from partita.runtime.mesh import Mesh
from partita.runtime.transport import Transport
from partita.state.engine import StateEngine
from partita.state.optimizers import rule_names
from partita.train.checkpoint import Checkpointer
from partita.train.run import make_tiers, weight_source
from partita.train.view import View

Loss = Callable[[nn.Module, Any], torch.Tensor]
Settings = Sequence[str] | Mapping[str, Any]
OWN = ("pipeline", "context")  # axes that need the trainer's executor


@dataclass(frozen=True)
class StepResult:
    """One update. loss: mean over all ranks and micro-batches. norm: of the gradient, before clipping. applied: false where skipped."""

    loss: float
    norm: float
    lr: float
    applied: bool


def prepare(model: nn.Module, config: Settings = ()) -> Session:
    """A session that trains `model` as `config` says.

    model: real (rank 0's weights count), or on the meta device with `init_parameter` or `partita_weights`; frozen parameters stay.
    config: overrides as on the command line (["+strategy=zero3", "precision=bf16"]), or a mapping ({"zero.stage": 3}, also nested).
    Data and model of the config are not used. Raises ConfigError with all problems of the config and the plan.
    """
    world = _join()
    plain, info = compose_config([*_overrides(config), f"launch.ranks={world}", *_batch(config)])
    registry = registry_for(tuple(plain.plugins.block))
    model = registry.change_model(model, plain)
    planned = make_plan(plain, registry, module=model)
    planned.raise_problems()
    plan = planned.plan
    wide = [axis for axis in OWN if getattr(plan.layout, axis) > 1]
    if wide:
        raise ConfigError(
            f"parallel.{wide[0]}: a session runs your own forward pass, which is not cut\n    -> parallel.{wide[0]}=1"
        )
    return Session(model, planned, plain, registry, info)


def _batch(config: Settings) -> list[str]:
    """A session is given its batches, so their size is no part of the plan; a DeepSpeed file tells how many make an update."""
    given = "\n".join(_overrides(config))
    if "deepspeed=" in given:
        return []
    return [
        f"{key}={value}"
        for key, value in (("train.global_batch", "auto"), ("parallel.microbatches", 1))
        if f"{key}=" not in given
    ]


def _overrides(config: Settings) -> list[str]:
    if not isinstance(config, Mapping):
        return [str(o) for o in config]
    out: list[str] = []
    for key, value in _flat(config):
        out.append(f"{key}={_written(value)}")
    return out


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _written(value: Any) -> str:
    """A value in Hydra's notation."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value)


def _join() -> int:
    """Ranks: of the process group there is, or of the one that torchrun's or Slurm's variables describe."""
    if dist.is_initialized():
        return dist.get_world_size()
    if joined() is None:
        return 1
    adopt()
    dist.init_process_group(Device.current().backend, timeout=timedelta(minutes=10))
    atexit.register(_leave)
    return int(os.environ["WORLD_SIZE"])


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Session:
    """See the module's docstring; made by `prepare`. `plan`, `config`, `mesh`, `engine` may be read."""

    def __init__(self, model: nn.Module, planned: Planned, config: Any, registry: Any, info: Any) -> None:
        self.planned, self.plan, self.config, self.registry, self.job = planned, planned.plan, config, registry, info
        self.device = Device.current()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.mesh = Mesh(self.plan.layout, rank, self.device.torch_device)
        self.view = View()
        given = dict(model.named_parameters())  # whole, before transforms cut them
        for transform in registry.transforms(self.plan):
            model = transform.apply(model, self)
        self.model = model
        rule, *others = [registry.provide("optimizer", name)(config.optimizer) for name in rule_names(config.optimizer)]
        context = CollectiveContext(self.mesh, self.plan, Transport())
        collectives = registry.provide("collective", self.plan.collectives.provider)(context)
        tiers = make_tiers(self)
        self.engine = StateEngine(model, self.plan, self.mesh, config.optimizer, rule, collectives, tiers, others)
        self.engine.materialize(self._source(given))
        self._schedule = registry.provide("lr_schedule", config.lr_schedule.name)(config.lr_schedule, config.train.steps)
        self._share = 1.0 / (self.plan.layout.data * self.plan.schedule.micro_batches)
        self._passes = 0
        self._local = torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    def _source(self, parameters: dict[str, nn.Parameter]) -> Any:
        """Weights by name: the model's own, rank 0's on all; drawn or read where it stands on the meta device."""
        if any(p.is_meta for p in parameters.values()):
            return weight_source(self.model, self.config.seed)

        def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            value = parameters[name].detach().to(self.mesh.device, copy=True)
            if self.mesh.world > 1:
                dist.broadcast(value, src=0)
            return value

        return source

    # ------------------------------------------------------------------ training

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.mesh.rank

    @property
    def updates(self) -> int:
        """Updates that were applied."""
        return self.engine.updates

    @property
    def micro_batches(self) -> int:
        """Backward passes of one update (`parallel.microbatches`)."""
        return self.plan.schedule.micro_batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor, share: float | torch.Tensor | None = None) -> None:
        """Backward of one micro-batch; the last one of an update (see `micro_batches`) reduces the gradients.

        loss: 0-d. share: what it counts in the global loss; default: every rank and micro-batch counts the same, so that the gradient
        is that of the mean. Losses that are sums over a varying number of tokens take 1 / (tokens of all ranks and micro-batches).
        """
        if self._passes >= self.micro_batches:
            raise PartitaError(
                f"backward was called {self._passes + 1} times, and an update has {self.micro_batches} micro-batches. "
                "Call step() first, or prepare with parallel.microbatches."
            )
        if not self._passes:
            self.engine.begin_step()
            self._local.zero_()
        self._passes += 1
        scaled = loss * (self._share if share is None else share)
        self.engine.backward(scaled, last=self._passes == self.micro_batches)
        self._local += scaled.detach().double()

    def step(
        self,
        batch: Any = None,
        loss_fn: Loss | None = None,
        *,
        weight: Callable[[Any], int] | None = None,
        lr: float | None = None,
    ) -> StepResult:
        """One update. Without arguments: with the gradients that `backward` has made.

        batch: this rank's samples, or a list of `micro_batches` of them. loss_fn(model, micro-batch): the mean loss, or with `weight`
        (items that count in a micro-batch, known before the forward pass) the sum. lr: default: optimizer.lr by the lr_schedule.
        """
        if batch is not None:
            if loss_fn is None:
                raise PartitaError("step(batch) needs a loss_fn: a function (model, batch) -> 0-d loss.")
            self._all_passes(batch if self.micro_batches > 1 else [batch], loss_fn, weight)
        if self._passes != self.micro_batches:
            raise PartitaError(f"step() after {self._passes} of {self.micro_batches} backward passes. Make the others first.")
        self._passes = 0
        norm, (loss,) = self.engine.finish_gradients(self._local.reshape(1) / self._copies())
        rate = lr if lr is not None else self.config.optimizer.lr * self._schedule(self.engine.updates + 1)
        applied = self.engine.update(rate, self.config.train.grad_clip, norm)
        if not applied and not self.engine.scaler.skips and self.config.train.on_nonfinite == "stop":
            raise PartitaError(
                f"update {self.engine.updates + 1}: the gradient norm is {norm} (loss {loss}); it was not applied. "
                "Lower optimizer.lr, set train.grad_clip, or go on with train.on_nonfinite=skip."
            )
        return StepResult(loss, norm, rate, applied)

    def _copies(self) -> int:
        """Ranks that see the same samples: their losses must count once."""
        return self.plan.layout.world // self.plan.layout.data

    def _all_passes(self, batches: Sequence[Any], loss_fn: Loss, weight: Callable[[Any], int] | None) -> None:
        if not isinstance(batches, list | tuple) or len(batches) != self.micro_batches:
            raise PartitaError(f"step() wants a list of {self.micro_batches} micro-batches (parallel.microbatches).")
        share = None if weight is None else 1.0 / max(1, self.total(sum(int(weight(b)) for b in batches)))
        for micro in batches:
            self.backward(loss_fn(self.model, micro), share)

    def total(self, count: int) -> int:
        """The sum of a number over the ranks that see different samples."""
        group = self.mesh.group(("replicate", "shard"))
        value = torch.tensor(count, dtype=torch.int64, device=self.mesh.device)
        if group.size > 1:
            dist.all_reduce(value, group=group.process_group)
        return int(value)

    # ------------------------------------------------------------------ whole states

    def parameter(self, name: str) -> torch.Tensor:
        """A whole parameter as the optimizer keeps it. Collective, like all of these."""
        return self.engine.full_tensor(name)

    def gradient(self, name: str) -> torch.Tensor:
        """A whole gradient of the last update, before clipping; until the next backward."""
        return self.engine.full_tensor(name, "gradient") / self.engine.scaler.used

    def state(self, name: str, kind: str) -> torch.Tensor:
        """A whole state of the optimizer, e.g. `exp_avg`."""
        return self.engine.full_tensor(name, kind)

    def names(self) -> list[str]:
        """Names of all parameters, tied ones once."""
        return [b.name for b in self.engine.bindings]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All whole parameters by name, on every rank; for models that fit one."""
        return {name: self.parameter(name) for name in self.names()}

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The model with whole weights on this rank, for generation or for a look into them."""
        with self.engine.full_parameters():
            yield self.model

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: Path | str) -> Path:
        """Write a checkpoint of all states into `folder`, which `load` and `train.resume` read under any layout."""
        with self._checkpoints(folder) as checkpoints:
            extra = {"step": self.updates, "engine": self.engine.extra_state(), "config": to_plain(self.config)}
            checkpoints.save(self.updates, self.engine.save_slices(), extra, {})
            return checkpoints.path(self.updates)

    def load(self, path: Path | str) -> None:
        """Take all states from a checkpoint, or from the newest one in a folder."""
        with self._checkpoints(path) as checkpoints:
            extra, _ = checkpoints.load(Path(path), self.engine.load_slices())
        self.engine.after_load()
        self.engine.load_extra_state(extra["engine"])

    @contextmanager
    def _checkpoints(self, folder: Path | str) -> Iterator[Checkpointer]:
        checkpoints = Checkpointer(Path(folder), self.mesh, asynchronous=False)
        try:
            yield checkpoints
        finally:
            checkpoints.close()
