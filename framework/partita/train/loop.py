"""The training loop: update after update, with evaluation, checkpoints, and an orderly end."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from partita.errors import CheckpointError, NonFiniteError, PartitaError, RollBack, RunInterrupted
from partita.plan.plan import AXES
from partita.runtime import phase
from partita.runtime.signals import signal_of
from partita.runtime.traffic import sent_among
from partita.runtime.transport import LoggedTransport
from partita.train.interval import SaveClock
from partita.train.progress import Progress
from partita.train.resume import go_on_from, remember, save
from partita.train.run import Run

log = logging.getLogger("partita")
MODEL_AXES = ("pipeline", "context", "tensor")  # along which one model and sample are shared


class StepClock:
    """Wall seconds between the ends of updates."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


class Control:
    """The one small all-reduce at the start of an update: tokens that count, and whether a rank was asked to stop.

    It runs while the first micro-batch is computed. All ranks get the same answer, so all stop after the same update.
    """

    def __init__(self, run: Run, batches: list[dict[str, torch.Tensor]]) -> None:
        counted = sum(int((b["labels"] != -100).sum()) for b in batches) if run.step_context.counts else 0
        self._values = torch.tensor([counted, run.stop.local()], dtype=torch.int64, device=run.mesh.device)
        group = run.mesh.group(AXES)
        self._work: Any = None
        if group.size > 1:
            work = dist.all_reduce(self._values, group=group.process_group, async_op=True)
            self._work = sent_among(group, self._values, work, 2, "control")

    def tokens(self) -> int:
        """Counted tokens of the whole update."""
        return self.wait()[0]

    def wait(self) -> tuple[int, int]:
        """(tokens of the whole update, signal number to stop for or 0)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        tokens, signals = self._values.tolist()
        return tokens, signal_of(signals)


def train(run: Run) -> dict[str, Any]:
    """Train until `train.steps`; returns the summary. Raises RunInterrupted after a signal, with a checkpoint written."""
    config = run.config.train
    with Progress(config.steps, config.log_every, enabled=run.rank == 0) as progress:
        loop = _Loop(run, progress)
        while True:
            try:
                loop.steps()
                break
            except RollBack as back:
                loop.roll_back(back)
        return {"status": "done", "steps": config.steps, **_finish(run, progress, loop.metrics, loop.saved)}


class _Loop:
    """Updates one after the other, each with what follows it."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.metrics: dict[str, Any] = {}
        self.saved = run.step  # step of the newest checkpoint
        self._clock, self._saves = StepClock(), SaveClock(run.config.train.save_every, run.config.train.mtbf, run.mesh)
        self._restart()

    def _restart(self) -> None:
        """What has been since the last update belongs to none: neither time nor messages."""
        self._clock.lap()
        self.run.transport.take()

    def steps(self) -> None:
        """All updates that are left."""
        run, config = self.run, self.run.config.train
        with run.data.iterate(run.step + 1) as updates:
            for step, batches in updates:
                if step > config.steps:
                    return
                self.metrics, signal = one_update(run, step, batches, self._clock)
                run.step = step
                run.metrics.write(self.metrics)
                self.progress.step(self.metrics)
                run.notify("partita_step_end", step=step, metrics=self.metrics)
                self._after(step, signal)

    def _after(self, step: int, signal: int) -> None:
        """Evaluation and saving, where it is time; the end, where a signal came."""
        run, config, score = self.run, self.run.config.train, None
        if config.eval_every and run.data.has_evaluation and step % config.eval_every == 0 and step < config.steps:
            score = evaluate(run, self.progress)["eval_loss"]
            self._restart()
        if signal:
            _stop(run, signal, self.saved != step)
        if self._saves.due(step):
            begun = time.perf_counter()
            self.saved = step if _save(run, score) else self.saved
            self._saves.saved(step, time.perf_counter() - begun)
        if run.memory is not None and step % config.memory_every == 0 and step < config.steps:
            remember(run)
        _poll(run)

    def roll_back(self, back: RollBack) -> None:
        """Go on from the newest checkpoint, with other samples than those of the updates that are undone."""
        run, undone = self.run, self.run.step
        _tolerate(run, run.checkpoints.wait)
        if run.mesh.world > 1:
            dist.barrier()  # the checkpoint is the newest for all of them
        path = run.checkpoints.latest()
        if path is None:
            raise PartitaError(f"{back}\n    -> there is no checkpoint to go back to yet: set train.save_every to less") from back
        skipped = run.data.skipped
        go_on_from(run, path)
        run.data.skipped = skipped + undone - run.step + back.skip
        if run.memory is not None:
            run.memory.forget()
        self.saved = run.step
        if run.rank == 0:
            log.warning("%s", back)
            log.warning("went back to step %d; %d updates' samples are passed over", run.step, run.data.skipped - skipped)
        self._restart()


def one_update(run: Run, step: int, batches: list[dict[str, torch.Tensor]], clock: StepClock) -> tuple[dict[str, Any], int]:
    """All micro-batches of one update and the optimizer; returns its metrics line and the signal to stop for (or 0)."""
    phase.set(step=step, phase="train")
    config, engine = run.config.train, run.engine
    run.notify("partita_step_start", step=step)
    batches = [run.view.batch(batch) for batch in batches]
    engine.begin_step()
    control = Control(run, batches)
    local = run.executor.train(step, batches, control.tokens)
    total, signal = control.wait()
    norm, (loss,) = engine.finish_gradients(local.reshape(1).to(torch.float64))
    run.notify("partita_gradients_ready", step=step)
    loss /= max(total, 1)
    lr = run.config.optimizer.lr * run.schedule(engine.updates + 1)
    against = next((why for veto in run.vetoes if (why := veto(step, loss, norm))), "")
    if not against and not engine.update(lr, config.grad_clip, norm) and not engine.scaler.skips:
        _nonfinite(run, step, loss, norm)
    metrics = _metrics(run, step, loss, norm, lr, total, clock.lap())
    return ({**metrics, "left_out": against} if against else metrics), signal


def _metrics(run: Run, step: int, loss: float, norm: float, lr: float, tokens: int, seconds: float) -> dict[str, Any]:
    positions = run.plan.schedule.global_batch * run.config.data.sequence
    metrics = {
        "step": step,
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": positions / seconds,
        "memory": run.device.memory(),
    }
    if run.engine.scaler.skips:
        metrics |= {"loss_scale": run.engine.scaler.value, "skipped": run.engine.scaler.skipped}
    if isinstance(run.transport, LoggedTransport):
        metrics["communication"] = run.communication.add(seconds, run.transport.take())
    metrics |= run.gauges
    run.gauges = {}
    flops = getattr(run.model, "flops_per_token", None)
    peak = run.config.train.peak_flops or run.device.peak_flops(run.plan.precision.compute)
    if flops is not None and peak:
        metrics["mfu"] = flops(run.config.data.sequence) * positions / seconds / (peak * run.mesh.world)
    return metrics


def _nonfinite(run: Run, step: int, loss: float, norm: float) -> None:
    """A gradient norm that is not finite, without a loss scale to blame."""
    what = f"step {step}: the gradient norm is {norm} (loss {loss}); the update was not applied"
    if run.config.train.on_nonfinite == "stop":
        raise NonFiniteError(f"{what}. Lower optimizer.lr, set train.grad_clip, or go on with train.on_nonfinite=skip.")
    if run.rank == 0:
        log.warning("%s (skipped so far: %d)", what, run.engine.scaler.skipped)


def evaluate(run: Run, progress: Progress) -> dict[str, Any]:
    """Mean loss over the validation set, each sample once whatever the number of ranks. Collective."""
    phase.set(step=run.step, phase="evaluate")
    started = time.perf_counter()
    run.model.eval()
    try:
        sums = run.executor.evaluate(run.step, map(run.view.batch, run.data.evaluation(run.config.train.eval_batches)))
    finally:
        run.model.train()
    group = run.mesh.group(AXES)
    if group.size > 1:
        dist.all_reduce(sums, group=group.process_group)
    total, tokens = sums.tolist()
    loss = total / tokens if tokens else math.nan
    run.best = loss if run.best is None or loss < run.best else run.best
    perplexity = math.exp(loss) if loss < 700 else math.inf
    metrics = {"step": run.step, "eval_loss": loss, "eval_perplexity": perplexity, "eval_tokens": int(tokens)}
    metrics["eval_seconds"] = time.perf_counter() - started
    run.metrics.write(metrics)
    progress.say(f"step {run.step}  evaluation loss {loss:.4f} (perplexity {perplexity:.4g}) over {int(tokens):,} tokens")
    run.notify("partita_evaluate", step=run.step, metrics=metrics)
    phase.set(step=run.step, phase="train")
    return metrics


def _save(run: Run, score: float | None) -> bool:
    """Save; on failure stop or go on (False), as `train.on_save_error` says."""
    return _tolerate(run, lambda: save(run, score))


def _poll(run: Run) -> None:
    """Meet a background save that has failed."""
    _tolerate(run, run.checkpoints.poll)


def _tolerate(run: Run, action: Any) -> bool:
    try:
        action()
    except CheckpointError as error:
        if run.config.train.on_save_error != "warn":
            raise
        log.warning("checkpoint failed, training goes on: %s", error)
        return False
    return True


def _stop(run: Run, signum: int, needed: bool) -> None:
    """Leave after a signal: all ranks are here after the same update."""
    if needed:
        save(run)
    run.checkpoints.wait()
    message = f"stopped by signal {signum} after step {run.step}; checkpoint {run.checkpoints.path(run.step)}"
    raise RunInterrupted(signum, message)


def _finish(run: Run, progress: Progress, metrics: dict[str, Any], saved: int) -> dict[str, Any]:
    """Last evaluation, last checkpoint, a sample of text."""
    config = run.config.train
    out: dict[str, Any] = {"step": run.step, "loss": metrics.get("loss")}
    score = None
    if config.eval_at_end and run.data.has_evaluation:
        score = evaluate(run, progress)["eval_loss"]
        out["eval_loss"] = score
    if config.save_at_end and saved != run.step:
        _save(run, score)
    if config.sample:
        sample(run, progress)
    if config.communication_log and run.rank == 0:
        run.pictures["communication"] = run.communication.write(run.dir)
        progress.say(run.communication.table())
    _tolerate(run, run.checkpoints.wait)
    latest = run.checkpoints.latest()
    out["checkpoint"] = str(latest) if latest else None
    return out


def sample(run: Run, progress: Progress) -> None:
    """Text that the trained model goes on with, shown and kept in sample.txt. Collective: weights may be cut."""
    from partita.models.sample import Agreed, generate

    phase.set(step=run.step, phase="sample")
    with run.engine.full_parameters(), run.view.whole():
        experts = run.plan.layout.expert > 1
        # the ranks that share a model with rank 0 make the same text together; experts may be on any rank
        if experts or 0 in run.mesh.ranks(MODEL_AXES):
            settings = (run.tokenizer, run.config.train.sample_prompt, run.config.train.sample, run.config.seed)
            text = generate(Agreed(run.executor.whole) if experts else run.executor.whole, *settings)
            if run.rank == 0:
                (run.dir / "sample.txt").write_text(text)
                progress.say(f"sample:\n{text}")
        if run.mesh.world > 1:
            dist.barrier()
