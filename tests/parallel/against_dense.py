"""A model in a layout against the dense model with the same weights: logits, the norm and the gradient of every parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partita.models.init import initialize
from partita.runtime.spec import RunSpec
from partita.state.units import bind_parameters
from partita.train.loss import token_cross_entropy

CLOSE = 2e-5  # of differences, relative to the largest element where that is more than 1


def compare(rank: int, world: int, spec: RunSpec, valid: tuple[int, ...] = ()) -> list[str]:
    """What differs, as this rank sees it; empty where nothing does. valid: tokens that count of one sample after the other, if not all."""
    from partita.train.run import open_run

    torch.set_num_threads(1)
    run = open_run(spec)
    try:
        model = _dense(run)
        _load(run, model)
        return [*_logits(run, model), *_gradients(run, model, valid)]
    finally:
        run.close()


def _dense(run: Any) -> nn.Module:
    """The whole model. Norms and biases are moved away from ones and zeros, which would hide mistakes."""
    with torch.device("meta"):
        model = run.registry.build_model(run.config, run.config.model.vocab or run.tokenizer.vocab_size)
    initialize(model, run.config.seed)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.05)
    return model


def _load(run: Any, model: nn.Module) -> None:
    """Write the dense model's weights into the engine, as a checkpoint would."""
    whole = {f"model.{b.name}": b.parameter.detach().reshape(-1) for b in bind_parameters(model)}
    for s in run.engine.load_slices():
        if s.key in whole:
            s.data.copy_(whole[s.key][s.lo : s.hi])
    run.engine.after_load()


def _logits(run: Any, model: nn.Module) -> list[str]:
    ids = torch.randint(run.config.model.vocab, (2, run.config.data.sequence), generator=torch.Generator().manual_seed(2))
    run.model.eval()
    with run.engine.full_parameters(), run.view.whole(), torch.no_grad():
        got = run.executor.whole(ids)
    run.model.train()
    with torch.no_grad():
        return _differences("logits", got, model.eval()(ids))


def _gradients(run: Any, model: nn.Module, valid: tuple[int, ...]) -> list[str]:
    """Of one update, before the optimizer."""
    from partita.train.loop import Control

    batches = run.data.step(1)
    for batch in batches if valid else []:
        for row, sample in enumerate(batch["sample"].tolist()):
            batch["labels"][row, valid[sample % len(valid)] :] = -100
    everyone = _all_samples(batches)
    run.engine.begin_step()
    batches = [run.view.batch(b) for b in batches]
    control = Control(run, batches)
    local = run.executor.train(1, batches, control.tokens)
    total, _ = control.wait()
    norm, _ = run.engine.finish_gradients(local.reshape(1).double())
    loss, counted = token_cross_entropy(model.train()(everyone["input_ids"]), everyone["labels"])
    (loss / counted).backward()
    whole = {b.name: b.parameter.grad for b in bind_parameters(model)}
    expected = sum(float(g.double().square().sum()) for g in whole.values() if g is not None) ** 0.5
    wrong = [] if total == counted else [f"{total} tokens counted, not {counted}"]
    wrong += [] if abs(norm - expected) <= 1e-5 * expected else [f"norm {norm}, not {expected}"]
    for b in run.engine.bindings:
        got, want = run.engine.full_tensor(b.name, "gradient"), whole[b.name]
        wrong += _differences(b.name, got, torch.zeros_like(got) if want is None else want)
    return wrong


def _all_samples(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Ids and labels of all samples of the update, each once."""
    mine = [(b["sample"].tolist(), b["input_ids"], b["labels"]) for b in batches]
    ranks: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    found = {n: (i, t) for rank in ranks for samples, ids, labels in rank for n, i, t in zip(samples, ids, labels, strict=True)}
    ids, labels = zip(*found.values(), strict=True)
    return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}


def _differences(name: str, a: torch.Tensor, b: torch.Tensor) -> list[str]:
    if a.shape != b.shape:
        return [f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}"]
    worst = float((a - b).abs().max())
    return [] if worst <= CLOSE * max(1.0, float(b.abs().max())) else [f"{name}: off by {worst:.2e}"]
