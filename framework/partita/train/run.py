"""One run on one rank: built in order, trained, closed whatever happens."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partita.config.plain import from_plain, root_type
from partita.errors import PartitaError, RunInterrupted
from partita.plan.plan import Plan
from partita.plugin.registry import Registry
from partita.runtime import phase
from partita.runtime.collectives import CollectiveContext
from partita.runtime.device import Device
from partita.runtime.memory import keep_freed_memory, return_freed_memory
from partita.runtime.mesh import Mesh
from partita.runtime.rng import name_generator
from partita.runtime.signals import StopFlag
from partita.runtime.spec import MEMORY, RunSpec
from partita.runtime.traffic import Traffic, watch
from partita.runtime.transport import LoggedTransport, Transport
from partita.state.engine import StateEngine
from partita.state.optimizers import rule_names
from partita.state.tiers import Tier, TierRequest
from partita.train.checkpoint import Checkpointer
from partita.train.communication import CommunicationLog
from partita.train.kernels import use_kernels
from partita.train.memory import MemorySnapshots
from partita.train.metrics import MetricsFile
from partita.train.step import Executor, StepContext
from partita.train.view import View

log = logging.getLogger("partita")


@dataclass
class Run:
    """Everything of a run that observers may read. `step` is the last finished update."""

    spec: RunSpec
    config: Any
    plan: Plan
    registry: Registry
    device: Device
    mesh: Mesh
    stop: StopFlag
    dir: Path
    name: str
    step: int = 0
    model: nn.Module = field(init=False)
    engine: StateEngine = field(init=False)
    transport: Transport = field(init=False)
    tokenizer: Any = field(init=False)
    data: Any = field(init=False)
    step_context: StepContext = field(init=False)
    executor: Executor = field(init=False)
    schedule: Any = field(init=False)
    checkpoints: Checkpointer = field(init=False)
    memory: MemorySnapshots | None = None
    metrics: MetricsFile = field(init=False)
    best: float | None = None
    gauges: dict[str, Any] = field(default_factory=dict)  # figures that plug-ins add to the metrics of the update under way
    # asked before each update, on all ranks, with step, loss and gradient norm, which are equal on all of them: why it is to be left
    # out, or an empty text
    vetoes: list[Callable[[int, float, float], str]] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)  # SVG files that plug-ins have made of the run, for trackers, by name
    view: View = field(default_factory=View)
    communication: CommunicationLog = field(default_factory=CommunicationLog)  # filled where train.communication_log asks for it

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.mesh.rank

    def notify(self, hook: str, **arguments: Any) -> None:
        """Tell observers of a phase, if there are any."""
        if self.registry.has(hook):
            getattr(self.registry.hook, hook)(run=self, **arguments)

    def close(self) -> None:
        """Release what the run holds, as far as it was built; called also after errors, so nothing here may need another rank."""
        for name in ("data", "checkpoints", "memory", "metrics", "engine", "transport"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        watch(None)


def worker(spec: RunSpec) -> dict[str, Any]:
    """Run one rank of `spec` to its end; returns the summary. The process group exists already.

    Raises RunInterrupted after a signal (a checkpoint is written), PartitaError and anything else on failure.
    """
    run = _open(spec)
    try:
        _build(run)
        run.notify("partita_run_start")
        from partita.train.loop import train

        summary = train(run)
    except RunInterrupted as stopped:
        run.notify("partita_run_end", summary={"status": "interrupted", "step": run.step, "signal": stopped.signum})
        raise
    except BaseException as error:
        run.notify("partita_failure", error=error)
        raise
    finally:
        run.close()
    if run.memory is not None:
        run.memory.remove()
    run.notify("partita_run_end", summary=summary)
    return summary


def open_run(spec: RunSpec) -> Run:
    """A run that is built and resumed, for callers that step it themselves (`partita.train.loop.one_update`) and call `close` in the end. Observers aren't told."""
    run = _open(spec)
    _build(run)
    return run


def _open(spec: RunSpec) -> Run:
    phase.set(step=0, phase="build")
    registry = Registry.load(spec.blocked)
    config = from_plain(spec.config, root_type(registry))
    device = Device.current()
    if device.kind == "cpu":
        return_freed_memory()
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(spec.plan.layout, rank, device.torch_device)
    return Run(spec, config, spec.plan, registry, device, mesh, StopFlag.installed(), spec.job.dir, spec.job.name)


def _build(run: Run) -> None:
    """mesh -> model on meta -> transforms -> state buffers -> optimizer -> data -> resume."""
    config, registry = run.config, run.registry
    torch.manual_seed(config.seed)
    use_kernels(config, registry)
    run.tokenizer = make_tokenizer(config, registry)
    model = registry.build_model(config, config.model.vocab or run.tokenizer.vocab_size)
    for transform in registry.transforms(run.plan):
        model = transform.apply(model, run)
    run.model = model.train()
    rule, *others = [registry.provide("optimizer", name)(config.optimizer) for name in rule_names(config.optimizer)]
    run.transport = _transport(run)
    context = CollectiveContext(run.mesh, run.plan, run.transport)
    collectives = registry.provide("collective", run.plan.collectives.provider)(context)
    tiers = make_tiers(run)
    run.engine = StateEngine(model, run.plan, run.mesh, config.optimizer, rule, collectives, tiers, others)
    run.engine.materialize(weight_source(model, config.seed))
    if run.device.kind == "cpu":
        keep_freed_memory()
    objective = getattr(model, "partita_loss", "causal")
    run.step_context = _step_context(
        run, registry.provide("loss", objective if config.train.loss == "auto" else config.train.loss)
    )
    run.executor = registry.provide("executor", run.plan.schedule.name)(run.step_context)
    run.schedule = registry.provide("lr_schedule", config.lr_schedule.name)(config.lr_schedule, config.train.steps)
    run.data = _make_data(run, objective)
    t = config.train
    run.checkpoints = Checkpointer(
        run.dir / "checkpoints", run.mesh, keep=t.keep, keep_best=t.keep_best, asynchronous=t.async_save
    )
    run.memory = _memory(run) if t.memory_every else None
    run.metrics = MetricsFile(run.dir / "metrics.jsonl", enabled=run.rank == 0)
    from partita.train.resume import resume  # it reads `Run`

    resume(run)


def _memory(run: Run) -> MemorySnapshots:
    """In memory that the process which started the ranks holds, else in a folder of this node's."""
    if run.spec.memory:
        return MemorySnapshots(run.dir / MEMORY, run.mesh, run.spec.memory)
    name = hashlib.sha256(str(run.dir.absolute()).encode()).hexdigest()[:12]
    return MemorySnapshots(Path(run.config.train.memory_path) / f"partita_memory_{os.getuid()}_{name}", run.mesh)


def _transport(run: Run) -> Transport:
    """What sends messages; it counts and times them where that is asked for, and then also those of layers among themselves."""
    if not run.config.train.communication_log:
        return Transport()
    traffic = Traffic()
    watch(traffic)
    return LoggedTransport(traffic)


def _step_context(run: Run, loss: Any) -> StepContext:
    t, model = run.config.train, run.config.model
    return StepContext(
        run.model,
        run.engine,
        run.mesh,
        run.plan,
        run.view.loss(loss),
        seed=run.config.seed,
        noise=model.dropout > 0 or getattr(run.model, "partita_noise", False),
        label_smoothing=t.label_smoothing,
        z_loss=t.z_loss,
    )


def make_tiers(run: Any) -> dict[str, Tier]:
    """What holds the states that the plan keeps elsewhere than on the device, by place. run: or a session."""
    tiers = run.plan.tiers
    places = {t.place for t in (tiers.parameters, tiers.gradients, tiers.optimizer)} - {"accelerator"}
    request = TierRequest(run.mesh.device, run.rank, tiers.path)
    return {place: run.registry.provide("tier", place)(request) for place in sorted(places)}


def _make_data(run: Run, objective: str) -> Any:
    from partita.data.make import make_data

    group = run.mesh.group(("replicate", "shard"))
    corpus = run.registry.provide("corpus", run.config.data.name)
    return make_data(run.config, run.plan.schedule, group.rank, group.size, run.tokenizer, corpus, objective)


def make_tokenizer(config: Any, registry: Registry) -> Any:
    """The tokenizer by name of the slot; any other name is the path of a file or folder."""
    from partita.data.tokenizer import make_file

    known = config.data.tokenizer in registry.slots().get("tokenizer", {})
    return registry.provide("tokenizer", config.data.tokenizer)(config) if known else make_file(config)


def weight_source(model: nn.Module, seed: int) -> Any:
    """Whole initial weights by name: from a file where the model has one (`partita_weights`), else drawn from seed and name alone.

    Raises PartitaError where the model offers neither `partita_weights` nor `init_parameter` and stands on the meta device.
    """
    stored = getattr(model, "partita_weights", None)
    if stored is not None:
        return stored
    draw = getattr(model, "init_parameter", None)
    if draw is None:
        if any(p.is_meta for p in model.parameters()):
            raise PartitaError(f"{type(model).__name__} is on the meta device and has no init_parameter(name, tensor, generator)")
        return None

    def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.float32)
        draw(name, tensor, name_generator(seed, name))
        return tensor

    return source
