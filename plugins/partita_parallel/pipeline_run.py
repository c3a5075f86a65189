"""Runs the micro-batches of an update through the stages of a pipeline, in the order that the schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from partita.plan.stages import last_stage, stages_of
from partita.state.engine import Unit
from partita.state.layout import dtype_of
from partita.train.step import Batch, StepContext
from partita_parallel.pipeline_defer import Deferral, Stash
from partita_parallel.pipeline_link import HEADER, Link, sent_by
from partita_parallel.pipeline_order import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Orders, orders
from partita_parallel.pipeline_split import make_stage

# What a stage took, and what its backward begins with (None: nothing before its end is trained)
Saved = tuple[torch.Tensor | None, torch.Tensor | GradientEdge | None]


@lru_cache(maxsize=16)
def forward_orders(place: tuple[int, ...], count: int) -> Orders:
    """All micro-batches through a rank's first stage, then through its next."""
    return {
        rank: tuple(Action(FORWARD, s, m) for s, where in enumerate(place) if where == rank for m in range(count))
        for rank in sorted(set(place))
    }


class PipelineExecutor:
    """Slot `executor` for the schedules of `pipeline_order`. See `partita.train.step.Executor`.

    Gradients are handed to the state engine by stage and micro-batch; it reduces those of a unit every `reduce_every` of them.
    """

    def __init__(self, context: StepContext) -> None:
        self._context, self._engine, self._mesh = context, context.engine, context.mesh
        layout, schedule = context.plan.layout, context.plan.schedule
        self._place, self._last = layout.stage_ranks, last_stage(layout)
        self._count = schedule.micro_batches
        rank = self._mesh.coordinates["pipeline"]
        numbers = stages_of(layout, rank)
        each = len(self._place) // layout.pipeline
        model: Any = context.model
        cut = model.partita_cut
        dtype = dtype_of(context.plan.precision.compute)
        self._stages = {n: make_stage(model, cut, layout, n, dtype) for n in numbers}
        found = orders(schedule.name, layout.pipeline, each, self._count)
        self._actions = found[rank]
        self._splits = any(a.kind == INPUT for a in self._actions)
        self._deferral = Deferral()
        if self._splits:
            self._deferral.install(context.model)
        self._link = Link(self._mesh, found, self._place)
        self._links: dict[int, Link] = {}
        self._units = self._find_units(numbers)
        self._turns = {unit: sum(unit in units for units in self._units.values()) for unit in self._engine.units}
        self._whole = WholeModel(self)
        self._run = {FORWARD: self._forward, BACKWARD: self._backward, INPUT: self._backward_input, WEIGHT: self._backward_weight}

    def _find_units(self, numbers: Sequence[int]) -> dict[int, list[Unit]]:
        """Units of each stage here; the root is one of the ends, which may both be here."""
        by_name = {unit.name: unit for unit in self._engine.blocks}
        assert self._engine.stages is not None
        units = {n: [by_name[name] for name in blocks] for n, blocks in zip(numbers, self._engine.stages.blocks, strict=True)}
        for n in units:
            if n in (0, self._last):
                units[n].append(self._engine.root)
        return units

    @property
    def whole(self) -> nn.Module:
        """See `Executor`. Each rank of the pipeline gets the logits."""
        return self._whole

    # ------------------------------------------------------------------ training

    def train(self, step: int, batches: Sequence[Batch], tokens: Callable[[], int]) -> torch.Tensor:
        """See `Executor`."""
        self._step, self._tokens, self._total = step, tokens, 0
        self._batches = [self._context.to_device(b) for b in batches]
        self._local = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        self._saved: dict[tuple[int, int], Saved] = {}
        self._stashes: dict[tuple[int, int], Stash] = {}
        self._near: dict[Action, torch.Tensor] = {}  # messages between two stages of this rank
        self._done = dict.fromkeys(self._engine.units, 0)
        self._held: list[Unit] = []
        self._mode()
        self._link.begin()
        if self._context.plan.schedule.gather == "step":
            self._hold([u for units in self._units.values() for u in units])
        for i, action in enumerate(self._actions):
            self._turn_to(i)
            self._run[action.kind](action)
        self._hold([])
        self._link.end()
        return self._local if self._mesh.coordinates["tensor"] == 0 else self._local.zero_()

    def _turn_to(self, i: int) -> None:
        """Have the stage of action `i` gathered for as long as the plan says, and start on the next one."""
        self._engine.root.wait_gathered()
        if self._context.plan.schedule.gather != "run" or self._actions[i].kind == WEIGHT:  # which reads no weights
            return
        units = self._units[self._actions[i].stage]
        if units is not self._held:
            self._hold(units)
        following = next((a for a in self._actions[i + 1 :] if a.kind != WEIGHT), None)
        if following is not None and self._units[following.stage] is not units:
            blocks = [u for u in self._units[following.stage] if u is not self._engine.root]
            blocks[0 if following.kind == FORWARD else -1].gather()

    def _hold(self, units: list[Unit]) -> None:
        for unit in units:
            unit.hold()
        for unit in self._held:
            unit.release()
        self._held = units

    def _forward(self, action: Action) -> None:
        _, stage, micro = action
        batch = self._batches[micro]
        x = self._take(Action(FORWARD, stage, micro)).requires_grad_() if stage else None
        y = self._stages[stage](x, self._context.inputs(self._step, batch))
        if stage < self._last:
            self._give(action, y)
            self._saved[stage, micro] = (x, get_gradient_edge(y) if y.requires_grad else None)
            return
        loss_sum, _ = self._context.loss_sum(y, batch["labels"])
        self._local += loss_sum.detach()
        self._saved[stage, micro] = (x, loss_sum / self._divisor())

    def _divisor(self) -> int:
        """Counted tokens of the update, asked for once."""
        self._total = self._total or max(self._tokens(), 1)
        return self._total

    def _backward(self, action: Action) -> None:
        units = self._units[action.stage]
        with self._engine.reductions.backward_of(units, self._due(units)):
            x = self._propagate(action)
        self._give_gradient(action, x)

    def _backward_input(self, action: Action) -> None:
        stash = self._stashes[action.stage, action.micro] = []
        with (
            self._engine.reductions.backward_of(self._units[action.stage], {}),
            self._engine.reductions.stashed(stash),
            self._deferral.into(stash),
        ):
            x = self._propagate(action)
        self._give_gradient(action, x)

    def _backward_weight(self, action: Action) -> None:
        self._engine.reductions.collect(self._stashes.pop((action.stage, action.micro)), self._due(self._units[action.stage]))

    def _propagate(self, action: Action) -> torch.Tensor | None:
        """Backward of one micro-batch through a stage; returns what it took, with its gradient."""
        x, end = self._saved.pop((action.stage, action.micro))
        self._engine.share = 1.0 / self._divisor()
        if isinstance(end, torch.Tensor):
            self._engine.scaler.scale(end).backward()
            return x
        gradient = self._take(Action(BACKWARD, action.stage, action.micro))
        if end is not None:
            torch.autograd.backward([end], [gradient])
        return x

    def _give_gradient(self, action: Action, x: torch.Tensor | None) -> None:
        if x is not None:
            assert x.grad is not None
            self._give(action, x.grad)

    def _due(self, units: Sequence[Unit]) -> dict[Unit, bool]:
        """Units whose gradients are to be reduced after this turn -> whether it is their last."""
        every = self._context.plan.schedule.reduce_every
        due = {}
        for unit in units:
            self._done[unit] += 1
            turns = self._turns[unit]
            last = self._done[unit] == turns * self._count
            if last or (self._engine.cuts_gradients and self._done[unit] % (turns * every) == 0):
                due[unit] = last
        return due

    # ------------------------------------------------------------------ messages

    def _take(self, message: Action) -> torch.Tensor:
        found = self._near.pop(message, None)
        return self._link.receive(message) if found is None else found

    def _give(self, action: Action, tensor: torch.Tensor) -> None:
        sent = sent_by(action, self._place)
        if sent is not None:
            self._link.send(sent[0], tensor)
        elif action.kind == FORWARD:
            self._near[Action(FORWARD, action.stage + 1, action.micro)] = tensor.detach()
        else:
            self._near[Action(BACKWARD, action.stage - 1, action.micro)] = tensor.detach()

    # ------------------------------------------------------------------ forward only

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[Batch]) -> torch.Tensor:
        """See `Executor`. As many batches as there are stages are under way together."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        counts = self._mesh.coordinates["tensor"] == 0
        source = iter(batches)
        while group := [self._context.to_device(b) for b in islice(source, len(self._place))]:
            inputs = [self._context.inputs(step, batch) for batch in group]
            for batch, logits in zip(group, self.forward(inputs), strict=False):
                found = torch.stack([value.double() for value in self._context.loss_sum(logits, batch["labels"])])
                sums += found if counts else 0.0  # ranks that share the logits make the loss together, and one counts
        return sums

    @torch.no_grad()
    def forward(self, inputs: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        """Logits of some micro-batches, on the rank of the last stage; elsewhere an empty list. Collective over the pipeline."""
        count = len(inputs)
        found = forward_orders(self._place, count)
        if count not in self._links:
            self._links[count] = Link(self._mesh, found, self._place, varying=True)
        self._mode()
        training, self._link = self._link, self._links[count]
        self._near = {}
        self._link.begin()
        logits = []
        try:
            for action in found[self._mesh.coordinates["pipeline"]]:
                self._engine.root.wait_gathered()
                x = self._take(action) if action.stage else None
                y = self._stages[action.stage](x, inputs[action.micro])
                if action.stage < self._last:
                    self._give(action, y)
                else:
                    logits.append(y)
            self._link.end()
        finally:
            self._link = training
        return logits

    def _mode(self) -> None:
        """The stages' own copies of modules that hold others follow the model into training or evaluation mode."""
        for stage in self._stages.values():
            stage.mode(self._context.model.training)


class WholeModel(nn.Module):
    """The logits of the whole model, on every rank of the pipeline. They call it together, with the same ids."""

    def __init__(self, executor: PipelineExecutor) -> None:
        super().__init__()
        model: Any = executor._context.model
        self.model = model
        self.partita_loss = getattr(model, "partita_loss", "causal")
        self.context = getattr(model, "context", None)
        self._executor = executor

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64 [B, T] -> logits [B, T, vocab]."""
        executor = self._executor
        found = executor.forward([{"input_ids": input_ids}])
        group = executor._mesh.group(("pipeline",))
        source = group.ranks[executor._place[executor._last]]
        size = torch.zeros(HEADER, dtype=torch.int64, device=input_ids.device)
        if found:
            size[: found[0].ndim] = torch.tensor(found[0].shape)
        dist.broadcast(size, source, group=group.process_group)
        dtype = dtype_of(executor._context.plan.precision.compute)
        logits = (
            found[0].contiguous() if found else torch.empty([n for n in size.tolist() if n], dtype=dtype, device=input_ids.device)
        )
        dist.broadcast(logits, source, group=group.process_group)
        return logits


def make_pipeline(context: StepContext) -> PipelineExecutor:
    """Builder of the slot `executor`."""
    return PipelineExecutor(context)
