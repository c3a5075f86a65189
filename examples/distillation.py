"""A large model teaches a small one, both in one process, each under a plan of its own.

python examples/distillation.py
torchrun --nproc-per-node=2 examples/distillation.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import partita
from partita.config.compose import compose_config
from partita.models.gpt import make_gpt

VOCAB, LENGTH, BATCH, STEPS = 64, 16, 8, 30
TEMPERATURE, SHARE = 2.0, 0.5  # of the soft targets (Hinton et al. 2015, section 2)


def gpt(layers: int, width: int) -> torch.nn.Module:
    """A GPT on the meta device: its weights are drawn shard by shard."""
    config, _ = compose_config([f"model.layers={layers}", f"model.width={width}", "model.heads=4", f"data.sequence={LENGTH}"])
    with torch.device("meta"):
        return make_gpt(config, VOCAB)


def samples(step: int, rank: int) -> torch.Tensor:
    """Counting sequences with a start of their own for each rank and step."""
    start = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (start + torch.arange(LENGTH + 1)) % VOCAB


def next_token(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting each next token."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of softened predictions, by position."""
    log_s, log_t = (F.log_softmax(x / TEMPERATURE, dim=-1).flatten(0, 1) for x in (student, teacher))
    return TEMPERATURE**2 * F.kl_div(log_s, log_t, log_target=True, reduction="batchmean")


def main() -> None:
    """Train the teacher, then the student on the teacher's predictions, while the teacher goes on."""
    common = ["lr_schedule=constant", "optimizer.lr=3e-3", "optimizer.weight_decay=0"]
    teacher = partita.prepare(gpt(3, 64), ["+strategy=zero3", *common])
    student = partita.prepare(gpt(1, 32), ["+strategy=zero2", *common])
    for step in range(STEPS):
        teacher.step(samples(step, teacher.rank), next_token)
    losses = []
    for step in range(STEPS, 4 * STEPS):
        ids = samples(step, student.rank)
        with torch.no_grad():
            wanted = teacher.forward(ids[:, :-1])
        out = student.forward(ids[:, :-1])
        labels = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        student.backward(SHARE * distance(out, wanted) + (1 - SHARE) * labels)
        student.step()
        teacher.step(ids, next_token)
        losses.append(labels.item())
    if student.rank == 0:
        first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
        print(f"the student's loss {'fell' if last < 0.8 * first else 'did not fall'} from {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()
