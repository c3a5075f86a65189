"""Activations on the host: the same gradients bit for bit, memory of the host bounded, what stays stays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))

from reference import Model, batch, loss_sum

import partita_offload.activations
from partita.plan.plan import Activations
from partita_offload.activations import offload_activations
from partita_recompute.checkpoint import recompute


def three_steps(policy: str, fraction: float | None) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    model: Any = Model()
    if policy != "keep":
        model = recompute(model, Activations(default=policy, patterns=("inner",)))
    if fraction is not None:
        model = offload_activations(model, fraction)
    losses, sizes = [], []
    for step in range(3):
        ids, labels = batch(step, 8)
        loss = loss_sum(model(ids), labels)
        loss.backward(retain_graph=step == 0)
        if step == 0:
            loss.backward()  # what came back once comes back again
        losses.append(loss.item())
        if fraction is not None:
            sizes.append(model.partita_offloader.buffers.bytes)
        with torch.no_grad():
            model(ids)  # an evaluation keeps nothing
    assert sizes[-1:] == sizes[-2:-1], "host memory grows"
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.parametrize("policy", ["keep", "full", "selective"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_gradients_are_the_same_bits(policy: str, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partita_offload.activations, "SMALL", 64)
    losses, gradients, model = three_steps(policy, fraction)
    wanted = three_steps(policy, None)
    assert losses == wanted[0]
    for name, value in wanted[1].items():
        assert torch.equal(gradients[name], value), name
    sent, seen = model.partita_offloader._sent, model.partita_offloader._seen
    assert sent == seen if fraction == 1 else 0.4 * seen < sent <= 0.5 * seen


def test_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partita_offload.activations, "SMALL", 0)
    model: Any = offload_activations(Model(), 1.0)
    shapes = set()
    send = model.partita_offloader._send
    model.partita_offloader._send = lambda t, size: (shapes.add(t.untyped_storage().nbytes()), send(t, size))[1]
    loss_sum(model(batch(0, 8)[0]), batch(0, 8)[1]).backward()
    assert shapes
    assert 24 * 24 * 4 not in shapes


def test_files_are_refused_for_activations(plan_of: Any, tmp_path: Path) -> None:
    (problem,) = plan_of(offload__activations="file", offload__path=str(tmp_path)).problems
    assert problem.key == "offload.activations"
    assert "host" in problem.remedy
