"""Watches a run from the observer hooks and from a thread on each rank."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from partita.errors import CheckpointError, NonFiniteError, PartitaError, RunInterrupted
from partita.plan.problems import Problem
from partita.plugin.markers import hookimpl
from partita.plugin.types import ConfigContribution
from partita_diagnosis.config import DiagnosisConfig

if TYPE_CHECKING:
    from partita_diagnosis.beat import Beat
    from partita_diagnosis.collectives import Watch
    from partita_diagnosis.monitor import Monitor
    from partita_diagnosis.numbers import SpikeGuard
    from partita_diagnosis.report import Report

CHOICES = {"on_hang": ("report", "stop"), "on_spike": ("warn", "skip", "roll_back", "stop")}
STEPS = 8  # over which a rank's own seconds are taken
FLOOR = 0.02  # seconds that a straggler must lose in each step to be worth a word
_watched: dict[int, Watched] = {}  # by id of the run


class Watched:
    """What is watched of one run on one rank."""

    def __init__(self, run: Any) -> None:
        from partita_diagnosis.beat import Beat
        from partita_diagnosis.collectives import Watch
        from partita_diagnosis.monitor import Monitor
        from partita_diagnosis.numbers import SpikeGuard
        from partita_diagnosis.report import Report

        self.folder = run.dir / "log" / "beat"
        self.report: Report = Report(run.dir, run.rank)
        self.beat: Beat = Beat(self.folder, run.rank, run.mesh.world)
        for old in ("dump", f"nonfinite-{run.rank}.json", f"where-{run.rank}.txt"):
            (self.folder / old).unlink(missing_ok=True)
        self.watch: Watch = Watch(self.beat)
        self.spikes: SpikeGuard = SpikeGuard(run.config.diagnosis, self.report if run.rank == 0 else None)
        if run.config.diagnosis.spike:
            run.vetoes.append(self.spikes.veto)
        self.monitor: Monitor = Monitor(run, self.beat, self.report)
        self.monitor.start()
        self._own: deque[float] = deque(maxlen=STEPS)
        self._lap: tuple[float, float] | None = None

    def close(self) -> None:
        """Leave the process as it was."""
        self.monitor.stop()
        self.watch.unwrap()

    def step(self, step: int) -> None:
        """A step begins."""
        self.beat.step = step
        self.beat.write()

    def lap(self) -> None:
        """A step ends: publish the median seconds of this rank's own work since the last one ended."""
        before, self._lap = self._lap, (time.perf_counter(), self.watch.seconds)
        if before is not None:
            begun, waited = before
            self._own.append(time.perf_counter() - begun - (self.watch.seconds - waited))
            if len(self._own) == STEPS:
                self.beat.own = statistics.median(self._own)
                self.beat.write()


@hookimpl
def partita_config() -> ConfigContribution:
    """Node `diagnosis`."""
    return ConfigContribution(nodes={"diagnosis": DiagnosisConfig})


@hookimpl
def partita_check(plan: Any, draft: Any) -> list[Problem]:
    """Values that are none of ours."""
    d, problems = draft.config.diagnosis, []
    for field, words in CHOICES.items():
        if getattr(d, field) not in words:
            problems.append(
                Problem(f"diagnosis.{field}", f"{getattr(d, field)!r} is unknown.", f"Use one of {', '.join(words)}.")
            )
    for field in ("hang_after", "straggler_factor", "slow_save"):
        if not getattr(d, field) > 0:
            problems.append(Problem(f"diagnosis.{field}", f"{getattr(d, field)} is not above 0.", "Give a number above 0."))
    for field in ("spike", "replicas_every", "recompute_every", "verify_every", "host_reserve", "roll_back_skip", "roll_backs"):
        if not getattr(d, field) >= 0:
            problems.append(Problem(f"diagnosis.{field}", f"{getattr(d, field)} is below 0.", "Give 0 (off) or more."))
    if d.on_spike == "roll_back" and d.spike and not draft.config.train.save_every:
        what = "without train.save_every there is no checkpoint to go back to."
        problems.append(Problem("diagnosis.on_spike", what, "Set train.save_every, or diagnosis.on_spike=skip."))
    return problems


@hookimpl
def partita_run_start(run: Any) -> None:
    """Begin to watch."""
    if run.config.diagnosis.enabled:
        _watched[id(run)] = Watched(run)


@hookimpl
def partita_step_start(run: Any, step: int) -> None:
    """Note the step; repeat a computation where that is asked for."""
    watched = _watched.get(id(run))
    if watched is None:
        return
    d = run.config.diagnosis
    if d.recompute_every and step % d.recompute_every == 0:
        from partita_diagnosis.numbers import compare_recomputed

        compare_recomputed(run, step, watched.report)
    watched.step(step)


@hookimpl
def partita_step_end(run: Any, step: int, metrics: dict[str, Any]) -> None:
    """Look at the loss, the ranks' own seconds, and the replicas."""
    watched = _watched.get(id(run))
    if watched is None:
        return
    d = run.config.diagnosis
    watched.lap()
    if run.rank == 0:
        _stragglers(watched, step, d.straggler_factor)
    if d.replicas_every and step % d.replicas_every == 0:
        from partita_diagnosis.numbers import compare_replicas

        compare_replicas(run, step, watched.report)
    if d.spike:
        watched.spikes.look(step, metrics["loss"])


def _stragglers(watched: Watched, step: int, factor: float) -> None:
    own = [s.own for s in watched.beat.all()]
    if len(own) < 2 or not all(own):
        return
    for rank, mine in enumerate(own):
        others = statistics.median(own[:rank] + own[rank + 1 :])
        if mine > factor * others and mine > others + FLOOR:
            cause = (
                f"rank {rank} is slow: its own work takes {1e3 * mine:.0f} ms a step, the median of the others' {1e3 * others:.0f} ms; "
                "all wait for it. Look for another program on its node, a hot or throttled device, or a larger share of work"
            )
            watched.report.add("straggler", step, cause, about=rank, own=mine, others=others)


@hookimpl
def partita_run_end(run: Any) -> None:
    """End watching."""
    watched = _watched.pop(id(run), None)
    if watched is not None:
        watched.close()


@hookimpl
def partita_failure(run: Any, error: BaseException) -> None:
    """Say why, as far as it can be found out."""
    watched = _watched.pop(id(run), None)
    if watched is None:
        return
    from partita_diagnosis import memory, numbers

    watched.beat.step = 0  # what follows is no hang
    step = run.step + 1
    try:
        if isinstance(error, NonFiniteError):
            numbers.trace_nonfinite(run, watched.report, watched.folder)
        elif memory.is_out_of_memory(error):
            memory.tell(run, error, watched.report)
        elif isinstance(error, CheckpointError):
            watched.report.add("checkpoint", step, str(error), about=run.rank)
        elif isinstance(error, PartitaError) and not isinstance(error, RunInterrupted):
            watched.report.add("failure", step, str(error), about=run.rank)
    finally:
        watched.close()
