"""What ranks run in the tests of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import partita
from partita.config.compose import compose_config

SIZES = ["model.layers=2", "model.width=16", "model.heads=2", "data.sequence=8", "model.init_std=0.2"]
VOCAB, STEPS, BATCH = 40, 4, 8
SGD = ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1", "optimizer.weight_decay=0", "lr_schedule=constant",
       "lr_schedule.warmup=0"]  # fmt: skip


def model(kind: str = "gpt") -> torch.nn.Module:
    """A small model of ours on meta; all of its weights depend on seed and name."""
    from partita.models.bert import make_bert
    from partita.models.gpt import make_gpt
    from partita.models.llama import make_llama

    config, _ = compose_config(SIZES)
    config.model.tie_embeddings = True
    with torch.device("meta"):
        return {"gpt": make_gpt, "llama": make_llama, "bert": make_bert}[kind](config, VOCAB)


def loss(net: Any, ids: torch.Tensor) -> torch.Tensor:
    """Predict the ids from themselves: any gradient will do."""
    return F.cross_entropy(net(ids).float().flatten(0, 1), ids.roll(-1, 1).flatten())


def batch(step: int, rank: int, world: int) -> torch.Tensor:
    """A rank's samples."""
    ids = torch.randint(VOCAB, (BATCH, 8), generator=torch.Generator().manual_seed(step))
    return ids.chunk(world)[rank]


def train(rank: int, world: int, overrides: list[str], kind: str = "gpt", folder: str | None = None) -> Any:
    """(losses, norms, all whole weights before, and after, bytes of states, trainable elements, planned bytes)."""
    session = partita.prepare(model(kind), [*SIZES, *SGD, *overrides])
    before = session.state_dict()
    results = [session.step(batch(0, rank, world), loss) for s in range(STEPS)]
    if folder:
        from partita_adapter.files import save_adapter

        save_adapter(session, Path(folder) / "adapter")
    trainable = sum(p.numel for p in session.planned.model.parameters if p.trainable)
    planned = session.planned.draft.state_bytes(session.plan)
    with torch.no_grad(), session.full_parameters():
        logits = session.model(batch(99, 0, 1)).float()
    return (
        [r.loss for r in results],
        [r.norm for r in results],
        before,
        session.state_dict(),
        session.engine.allocated(),
        trainable,
        planned,
        logits,
    )


def many(rank: int, world: int, cases: list[list[str]], kind: str = "gpt") -> list[Any]:
    """`train` for each of some lists of overrides, in one start of ranks."""
    return [train(rank, world, overrides, kind) for overrides in cases]


# ------------------------------------------------------------------ through the trainer

TRAINER = (
    "model.layers=4", "model.width=16", "model.heads=2", "data=synthetic", "data.limit=8000", "data.sequence=8", "model.vocab=64",
    "train.global_batch=8", "train.steps=3", "tracker=none", "model.init_std=0.2", "train.grad_clip=0", "train.resume=never", *SGD,
)  # fmt: skip


def spec_of(overrides: tuple[str, ...], folder: Path) -> Any:
    """What ranks get. Raises ConfigError with the problems of the plan."""
    from dataclasses import replace

    from partita.config.compose import registry_for
    from partita.config.plain import to_plain
    from partita.plan.make import make_plan
    from partita.runtime.spec import RunSpec

    config, job = compose_config([*TRAINER, *overrides])
    registry = registry_for(())
    planned = make_plan(config, registry)
    planned.raise_problems()
    plan = planned.plan
    return RunSpec(to_plain(config), plan, replace(job, dir=folder), plan.layout.world, registry.blocked)


def play(rank: int, world: int, specs: list[Any]) -> list[dict[str, Any]]:
    """Three updates of each spec: losses, norms, this rank's frozen weights that changed, whole trained weights. Each is saved."""
    return [_play(spec) for spec in specs]


def logits(rank: int, world: int, spec: Any) -> torch.Tensor:
    """Three updates, a checkpoint, and what the trained model says."""
    return _play(spec, logits=True)["logits"]  # type: ignore[no-any-return]


def _play(spec: Any, logits: bool = False) -> dict[str, Any]:
    from partita.train.loop import StepClock, one_update
    from partita.train.resume import save
    from partita.train.run import open_run

    run = open_run(spec)
    names = {f"model.{b.name}": b.parameter.requires_grad for b in run.engine.bindings}
    frozen = lambda: {(s.key, s.lo): s.data.clone() for s in run.engine.save_slices() if not names.get(s.key, True)}  # noqa: E731
    before, found = frozen(), []
    try:
        for step in range(1, 4):
            found.append(one_update(run, step, run.data.step(step), StepClock())[0])
            run.step = step
        changed = [
            key for key, value in frozen().items() if not torch.equal(value.view(torch.uint8), before[key].view(torch.uint8))
        ]
        save(run)
        run.checkpoints.wait()
        said = None
        if logits:
            with torch.no_grad(), run.engine.full_parameters():
                said = run.model.eval()(batch(99, 0, 1)).float()
        return {
            "logits": said,
            "loss": [m["loss"] for m in found],
            "norm": [m["grad_norm"] for m in found],
            "changed": changed,
            "frozen": len(before),
            "trained": {n: run.engine.full_tensor(n) for n, trained in ((k[6:], t) for k, t in names.items()) if trained},
            "allocated": run.engine.allocated(),
        }
    finally:
        for part in (run.data, run.checkpoints, run.metrics, run.engine):
            part.close()


def again(rank: int, world: int, folder: str, others: dict[str, str]) -> Any:
    """Logits of a session that begins with a saved adapter: with it, with others, with none."""
    from partita_adapter.layers import use

    more = [f"+adapter.others.{k}={v}" for k, v in others.items()]
    session = partita.prepare(model(), [*SIZES, *SGD, "+strategy=lora", f"adapter.path={folder}", "adapter.rank=3", *more])
    out = {}
    with torch.no_grad():
        for label in ["default", *others, None]:
            use(session.model, label)
            out[label] = session.forward(batch(99, 0, 1)).float()
    return out
