"""The state engine: carries out placement and precision of a plan for one model.

    engine = StateEngine(model_on_meta, plan, mesh, optimizer_config, rule)
    engine.materialize(source)
    for each update:
        engine.begin_step()
        for i, batch in enumerate(micro_batches):
            engine.backward(loss(model(batch)), last=i == len(micro_batches) - 1)
        norm = engine.finish_gradients(); engine.update(lr, clip)

When weights are whole is the business of `partita.state.gathers`, and when gradients are reduced that of `partita.state.reductions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from partita.errors import PartitaError
from partita.plan.plan import AXES, GRADIENT_AXES, Plan
from partita.runtime.collectives import Collectives, collectives_for, nested_all_gather
from partita.runtime.mesh import Mesh
from partita.state.bucket import Bucket, BufferPool, Groups
from partita.state.copies import Copies
from partita.state.gathers import Gathers
from partita.state.journal import Journal
from partita.state.layout import RuleLayout, build_layout, dtype_of, nested_cuts
from partita.state.optimizers import Rule, State, rule_reason
from partita.state.reductions import Reductions
from partita.state.saved import buffer_slices, renew_copies, slices_to_load, slices_to_save
from partita.state.scaler import LossScaler
from partita.state.slices import StateSlice
from partita.state.stored import Source, allocated, fill_buffers, initial
from partita.state.tiers import FarUpdater, Homes, Tier
from partita.state.unit import Unit
from partita.state.units import ROOT, SHARED, Binding, BoundSpec, Stages, bind_parameters, find_units
from partita.state.updates import build_updates
from partita_kernels.squares import WORTH_COMPILING

# wire formats of gradients that are a plain cast; others are the business of whoever provides the collectives
WIRE_DTYPES = ("bfloat16", "float16")


class StateEngine:
    """All states of one model on one rank. See the module's docstring for the order of calls.

    model: on the meta device, or real (its weights are then kept by `materialize()` without a source). rule: update rule.
    optimizer: config node with lr, groups, weight_decay, decay_1d. Of the plan's extensions `prefetch` says how many units are gathered
    ahead (1), and `max_gathered` how many bytes of weights may be whole at once (no bound).
    tiers: for each place in the plan's tiers but `accelerator`, what holds its states.
    more_rules: of groups that have another rule, in the order of `optimizers.rule_names`.
    Raises PartitaError where a parameter has no float dtype, or a rule can't update it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        optimizer: Any,
        rule: Rule,
        collectives: Collectives | None = None,
        tiers: Mapping[str, Tier] | None = None,
        more_rules: Sequence[Rule] = (),
    ) -> None:
        self.model, self.plan, self.mesh = model, plan, mesh
        self.device = mesh.device
        self.stages: Stages | None = getattr(model, "partita_stages", None)
        self.bindings = bind_parameters(model)
        self._refuse_odd_dtypes()
        self.rules = (rule, *more_rules)
        rules = [RuleLayout.of(r, plan.precision.optimizer) for r in self.rules]
        self.layout = build_layout(BoundSpec(self.bindings), plan, rules, optimizer)
        self._refuse_rules()
        self._collectives = collectives or collectives_for(self.device)
        self._homes = Homes(self.layout, tiers or {}, self.device)
        self._far = self._make_far_updater([])
        self._cut = tuple(a for a in AXES if a in self.layout.placement.optimizer)
        # All ranks make the usual groups in one order, whatever their stage needs of them.
        for partial in ((), ("tensor",)):
            self._groups((), partial)
        self._everyone = mesh.group(AXES)
        self._journal = Journal(mesh.rank)
        # where all data ranks share each gather they must make the same ones; ranks of a pipeline never do
        self._compares = self.stages is None and plan.layout.size(self.layout.placement.parameters) == plan.layout.data > 1
        self._copies = Copies(self.stages, mesh)
        self._ends = ExitStack()  # what `close` undoes
        self.scaler = LossScaler(plan.precision.loss_scale)
        self.updates = 0
        self.share = 1.0  # of one token in the objective, set by the executor: for terms that are attached inside the model
        self._scale = torch.zeros((), dtype=torch.float32, device=self.device)
        self._micro = 0
        self._factor = 1.0  # on the gradients of the last update

    # ------------------------------------------------------------------ building

    def _refuse_odd_dtypes(self) -> None:
        odd = [b.name for b in self.bindings if not b.parameter.dtype.is_floating_point]
        if odd:
            raise PartitaError(
                f"parameters must be floating point; these are not: {', '.join(odd[:5])}. Register them as buffers."
            )

    def _refuse_rules(self) -> None:
        """What the plan has been checked for, asked of the parameters that are really there."""
        segments = [(b, s) for b in self.layout.buckets if b.trainable for s in b.segments]
        found = [rule_reason(self.rules[b.rule], s.shape, self.plan, cut=bool(b.axes)) for b, s in segments]
        for (_, s), reason in zip(segments, found, strict=True):
            if reason:
                raise PartitaError(f"{s.name!r}: {reason}. Give it another rule by optimizer.groups.")

    def _groups(self, axes: tuple[str, ...], partial: tuple[str, ...]) -> Groups:
        """Groups of a bucket whose tensors are cut along `axes` and whose gradients are partial over `partial`."""
        shard = tuple(a for a in self._cut if a not in axes)
        replicas = tuple(a for a in AXES if (a in GRADIENT_AXES or a in partial) and a not in axes and a not in self._cut)
        copies = self.mesh.ranks(tuple(a for a in AXES if a != "pipeline" and a not in axes and a not in self._cut))
        placement = self.layout.placement
        cuts = [tuple(a for a in cut if a not in axes) for cut in nested_cuts(placement)]
        levels = tuple(g for g in map(self.mesh.group, cuts) if g.size > 1)
        weights, gradients = (sum(set(g.axes) <= set(c) for g in levels) for c in (placement.parameters, placement.gradients))
        whole = self.mesh.group(shard), self.mesh.group(replicas)
        return Groups(*whole, len(copies), copies.index(self.mesh.rank), levels, weights, gradients)

    def materialize(self, source: Source | None = None) -> None:
        """Allocate all buffers, bind the parameters to them, and fill them.

        source(name, shape) returns a whole parameter in any float dtype; it is called once for each, in the same order on all ranks,
        and one whole parameter is in memory at a time. A source that can read a part alone has a method part(name, part), which is
        asked for what is cut. None: the module's own values are taken.
        """
        pool = BufferPool(self.device)
        wire = self.plan.collectives.gradient_reduce.format
        wire_dtype = dtype_of(wire if wire in WIRE_DTYPES else self.plan.precision.reduce)
        by_name = {b.name: b for b in self.bindings}
        buckets: dict[str, list[Bucket]] = {}
        size = sum(b.padded for b in self.layout.buckets if b.trainable)
        alone = self._everyone.size == 1 and size >= WORTH_COMPILING
        for layout in self.layout.buckets:
            groups = self._groups(layout.axes, layout.partial)
            bucket = Bucket(
                layout, self.layout, groups, self._collectives, pool, self.device, wire_dtype, self._homes, self._journal, alone
            )
            for i, s in enumerate(layout.segments):
                bucket.write(i, initial(source, s) if source else by_name[s.name].parameter.detach())
            bucket.written()
            bucket.bind([self._real_parameter(by_name[s.name]) for s in layout.segments])
            bucket.free()
            buckets.setdefault(layout.unit, []).append(bucket)
        fill_buffers(self.model, self.device)
        blocks = [Unit(name, module, buckets.get(name, [])) for name, module in find_units(self.model)]
        outside = [b for name, found in buckets.items() if name == ROOT or name.startswith(SHARED) for b in found]
        self.root = Unit(ROOT, self.model, outside)
        self.blocks = blocks
        self.units = [*blocks, self.root]
        self.buckets = [b for u in self.units for b in u.buckets]
        self._trainable = [b for u in [*reversed(blocks), self.root] for b in u.trainable]
        self._updates = build_updates(self.buckets, self.layout, self.rules, self._collectives)
        # in the order in which the next forward pass needs them
        self._far = self._make_far_updater([b for u in [self.root, *blocks] for b in u.trainable])
        self._place = {s.name: (b, i) for b in self.buckets for i, s in enumerate(b.layout.segments)}
        prefetch, limit = self.plan.extensions.get("prefetch", 1), self.plan.extensions.get("max_gathered")
        self.gathers = Gathers(self.model, self.root, blocks, self.stages, prefetch, limit)
        if any(b.groups.shard.size > 1 for b in self.buckets) or self._homes.any:
            self.gathers.install()
        self.reductions = Reductions([*reversed(blocks), self.root], self.gathers, learns=self.stages is None)
        self._ends.callback(self.reductions.remove)

    def _real_parameter(self, binding: Binding) -> nn.Parameter:
        """The parameter on this device under all of its names: `.data` can't leave the meta device."""
        old = binding.parameter
        if old.device == self.device and old.dtype == dtype_of(self.plan.precision.compute):
            return old
        empty = torch.empty(0, dtype=dtype_of(self.plan.precision.compute), device=self.device)
        new = nn.Parameter(empty, requires_grad=old.requires_grad)
        for module, attribute in binding.holders:
            module._parameters[attribute] = new
        return new

    def _make_far_updater(self, order: list[Bucket]) -> FarUpdater:
        far = FarUpdater(order, self.layout.groups, self.rules, self.device, self._homes.lane)
        for bucket in order if self._homes.any else []:
            bucket.wait_updated = lambda b=bucket: far.wait(b)  # type: ignore[misc]
        return far

    # ------------------------------------------------------------------ backward

    def begin_step(self) -> None:
        """Before the first micro-batch of an update."""
        self._micro = 0
        self.gathers.begin_step()
        self._collectives.begin_step(self.updates + 1, self._factor)
        for unit in self.units:
            for bucket in unit.trainable:
                bucket.begin_step()

    @property
    def recomputing(self) -> bool:
        """Whether a forward that runs now is run again, for backward."""
        return self.gathers.in_backward

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Backward of one micro-batch. `loss` (0-d) is this micro-batch's share of the global mean; `last`: of this update."""
        self._micro += 1
        reduces = last or (self.cuts_gradients and self._micro % self.plan.schedule.reduce_every == 0)
        self.root.wait_gathered()  # whoever looked at whole weights has freed it since the forward
        due = dict.fromkeys(self.units, last) if reduces else {}
        with self.gathers.backward(last=last), self.reductions.backward_of(self.units, due):
            self.scaler.scale(loss).backward()

    @property
    def cuts_gradients(self) -> bool:
        """Whether gradients are reduced before the last micro-batch, so that each rank keeps its shard only."""
        return bool(self.layout.placement.gradients)

    # ------------------------------------------------------------------ update

    def finish_gradients(self, extra: torch.Tensor) -> tuple[float, list[float]]:
        """Finish all reductions. Returns the global gradient norm (L2, before clipping) and the sums of `extra` over all ranks.

        extra: 1-D float64 values of this rank, e.g. its loss; they ride on the norm's own all-reduce.
        """
        trainable = self._trainable
        for work in [b.reduce_replicas() for b in trainable if b.groups.shard.size > 1 and b.groups.replicas.size > 1]:
            work.wait()
        for bucket in trainable:
            self._copies.sum(bucket)
        square = self._square([b for b in trainable if self._copies.owns(b)], extra.dtype)
        places = self.reductions.places(extra.dtype, self.device)
        packed = torch.cat([square, extra.to(self.device), self._journal.values(extra.dtype, self.device), *places])
        self._collectives.all_reduce(packed, self._everyone).wait()
        square_sum, *values = packed.tolist()
        if places:
            count = len(values) - len(self.reductions.order)
            self.reductions.learn(values[count:])
            del values[count:]
        *values, digests, squares = values
        if self._compares and packed.dtype == torch.float64:
            self._journal.compare(digests, squares, self._everyone.size)
        return self._norm(square_sum), values

    def _norm(self, square_sum: float) -> float:
        return (square_sum**0.5 if square_sum >= 0 else float("nan")) / self.scaler.value

    def gradient_norm(self) -> float:
        """The global gradient norm anew, after gradients have been changed since `finish_gradients`. Collective."""
        square = self._square([b for b in self._trainable if self._copies.owns(b)], torch.float64, anew=True)
        self._collectives.all_reduce(square, self._everyone).wait()
        return self._norm(float(square))

    @contextmanager
    def full_gradient(self, name: str) -> Iterator[torch.Tensor]:
        """The whole reduced gradient of a parameter, to be changed in place; what it is at the end is taken over by all ranks.

        Between `finish_gradients` and `update`, with the loss scale. Collective: every rank makes the same change. `gradient_norm` gives
        the norm for `update`. Raises PartitaError for gradients that lie in a tier.
        """
        bucket, i = self._find(name)
        if "gradient" not in bucket.arrays or bucket.arrays["gradient"].far is not None:
            raise PartitaError(
                f"the gradient of {name!r} can't be changed: it is frozen, or offloaded (set offload.gradients=none)"
            )
        whole = self.full_tensor(name, "gradient")
        yield whole
        s = bucket.layout.segments[i]
        local, base = s.part.take(whole).reshape(-1), bucket.index * bucket.layout.shard
        lo, hi = max(base, s.offset), min(base + bucket.layout.shard, s.offset + s.numel)
        if lo < hi:
            bucket.arrays["gradient"].near[lo - base : hi - base].copy_(local[lo - s.offset : hi - s.offset])

    def _find(self, name: str) -> tuple[Bucket, int]:
        if name not in self._place:
            raise PartitaError(f"no parameter is called {name!r}")
        return self._place[name]

    def _square(self, trainable: list[Bucket], dtype: torch.dtype, anew: bool = False) -> torch.Tensor:
        """This rank's share [1] of the squared norm: what several ranks hold is divided among them, so each element counts once."""
        squares = [b.square(anew).reshape(1) for b in trainable]
        return torch.stack(squares).sum(0).to(dtype) if squares else torch.zeros(1, dtype=dtype, device=self.device)

    def update(self, lr: float, clip: float, norm: float) -> bool:
        """One optimizer update; False when it was skipped because the norm is not finite.

        lr: learning rate before the factor of each group. clip: largest norm, 0 for none. norm: from `finish_gradients`.
        """
        finite = norm - norm == 0.0
        self.scaler.update(finite)
        if not finite:
            return False
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self._factor = factor / self.scaler.used
        self._scale.fill_(self._factor)
        self.updates += 1
        self.settle()
        for hyper, update in self._updates:
            self.rules[hyper.rule].update(
                update, step=self.updates, lr=lr * hyper.lr_scale, weight_decay=hyper.weight_decay, scale=self._scale
            )
        for bucket in self.buckets:
            if bucket.layout.trainable:
                bucket.updated()
        self._far.start(self.updates, lr, self._scale)
        if not self._homes.any:  # else the first ones wait for their update, which goes on beside other work
            self.gathers.first()
        return True

    def settle(self) -> None:
        """Return when all states are at rest in their tiers. Raises PartitaError where an update there failed."""
        self._far.drain()
        self._homes.settle()

    def close(self) -> None:
        """Give back what lies outside of this process's memory, end threads, and let go of the model. The engine is unusable then."""
        self._ends.close()
        self._far.close()
        self._homes.close()

    # ------------------------------------------------------------------ access

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """All weights whole on this rank, as long as the context lasts. Collective."""
        with self.gathers.all_whole():
            yield

    def full_tensor(self, name: str, kind: str = "parameter") -> torch.Tensor:
        """A whole state of one parameter, in the shape of the global tensor. Collective over the ranks that hold parts of it.

        kind: `parameter` (master weights), `gradient` (reduced, between finish_gradients and the next begin_step, with the loss scale),
        or an optimizer state such as `exp_avg`. Raises PartitaError for an unknown name or kind.
        """
        bucket, i = self._find(name)
        self.settle()
        like_weights = [
            k for k in bucket.arrays if k not in bucket.formats or bucket.formats[k] == State(bucket.formats[k].dtype)
        ]
        array = bucket.master if kind == "parameter" else bucket.arrays[kind] if kind in like_weights else None
        if array is None:
            known = dict.fromkeys(["parameter", *(k for k in like_weights if k != "master")])
            raise PartitaError(f"{name!r} has no {kind!r}; it has {', '.join(known)}")
        s, source = bucket.layout.segments[i], array.whole()
        if source.numel() == bucket.layout.padded:
            whole = source
        else:
            whole = torch.zeros(bucket.layout.padded, dtype=source.dtype, device=self.device)
            whole.view(bucket.layout.shards, -1)[bucket.index] = source
            nested_all_gather(self._collectives, whole, bucket.groups.levels).wait()
        local = whole[s.offset : s.offset + s.numel].view(s.shape)
        if not s.part.axes:
            return local.clone()
        total = torch.zeros(s.part.shape, dtype=source.dtype, device=self.device)
        s.part.put(local, total)
        for axis in s.part.axes:  # one after the other, by groups that all ranks have
            self._collectives.all_reduce(total, self.mesh.group((axis,))).wait()  # of disjoint parts: exact
        return total

    def allocated(self, place: str = "accelerator") -> dict[str, int]:
        """Bytes of states at rest on this rank in one place, by category as `StateLayout.bytes`, read from the buffers themselves."""
        return allocated(self.buckets, self.layout, place)

    # ------------------------------------------------------------------ checkpoints

    def save_slices(self) -> list[StateSlice]:
        """This rank's part of all states: parts of all ranks are disjoint and cover each state once."""
        self.settle()
        out = slices_to_save(self.buckets, self._copies.owns)
        first = not any(at for axis, at in self.mesh.coordinates.items() if axis != "pipeline")
        return out + buffer_slices(self.model, self.stages.buffers if self.stages is not None else None) if first else out

    def load_slices(self) -> list[StateSlice]:
        """All that this rank needs, as views that a load writes into."""
        self.settle()
        return slices_to_load(self.buckets) + buffer_slices(self.model)

    def after_load(self) -> None:
        """The shards have been written from outside: renew the compute copies."""
        renew_copies(self.buckets)

    def extra_state(self) -> dict[str, Any]:
        """What is not a tensor: count of updates, loss scale. JSON-able."""
        return {"updates": self.updates, "scaler": self.scaler.state(), "factor": self._factor}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `extra_state`."""
        self.updates = int(state["updates"])
        self.scaler.load(state["scaler"])
        self._factor = float(state.get("factor", 1.0))
