"""What each fault does. A function is called on the rank it is for, with the run and its config node, at the start of the step."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from partita.train import shards
from partita.train.index import latest_in

FLIPPED = 30  # bit of a float32 (the highest of the exponent): small numbers become huge ones


def kill(run: Any, config: Any) -> None:
    """The process is gone without a word, as by the system's memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(run: Any, config: Any) -> None:
    """The process stops running, and stays."""
    os.kill(os.getpid(), signal.SIGSTOP)


def slow(run: Any, config: Any) -> None:
    """This and all later steps take longer."""
    time.sleep(config.seconds)


def _module(run: Any, config: Any) -> Any:
    modules = dict(run.model.named_modules())
    first = next(n for n, m in modules.items() if n and any(True for _ in m.parameters(recurse=False)))
    return modules[config.target or first]


def corrupt(run: Any, config: Any) -> None:
    """From the step on, every fourth call of a module gives a number that is a little off."""
    calls = [0]

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        calls[0] += 1
        if run.step + 1 < config.step or calls[0] % 4:
            return None
        return output * 1.001

    _module(run, config).register_forward_hook(spoil)


def nonfinite(run: Any, config: Any) -> None:
    """The output of a module is NaN, in this step only (and again where the step is computed again)."""

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        if run.step + 1 != config.step:
            return None
        return output * float("nan") if isinstance(output, torch.Tensor) else output

    _module(run, config).register_forward_hook(spoil)


def spike(run: Any, config: Any) -> None:
    """The samples of one update are bad: their logits are far off. It follows the samples, should they be passed over."""
    modules = dict(run.model.named_modules())
    last = [n for n, m in modules.items() if n and any(True for _ in m.parameters(recurse=False))][-1]

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * 100 if run.step + 1 + run.data.skipped == config.step else None

    modules[config.target or last].register_forward_hook(spoil)


def memory(run: Any, config: Any) -> None:
    """The device has no memory for what is asked of it."""
    torch.empty(1 << 60, dtype=torch.uint8, device=run.mesh.device)


@torch.no_grad()
def flip(run: Any, config: Any) -> None:
    """One bit of a weight, in this rank's copy."""
    weights = dict(run.model.named_parameters())
    weight = weights[config.target or next(iter(weights))].data
    view = weight.view(-1)[:1].view(torch.int32 if weight.element_size() == 4 else torch.int16)
    view ^= 1 << (FLIPPED if weight.element_size() == 4 else 14)


def full_disk(run: Any, config: Any) -> None:
    """No write of a checkpoint succeeds any more."""

    def refuse(_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shards.before_write = refuse


def slow_disk(run: Any, config: Any) -> None:
    """Each chunk of a checkpoint takes longer."""
    shards.before_write = lambda _bytes: time.sleep(config.seconds)


def unreadable(run: Any, config: Any) -> None:
    """A shard of the newest checkpoint no longer holds what was written."""
    run.checkpoints.wait()
    newest = latest_in(run.checkpoints.dir)
    if newest is None:
        raise RuntimeError(f"faults.step={config.step}: there is no checkpoint yet to damage; set train.save_every to less")
    path = newest / f"rank-{config.rank:05d}.bin"
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 1]))


def clock(run: Any, config: Any) -> None:
    """The wall clock jumps, as after a correction from outside."""
    real = time.time
    time.time = lambda: real() + config.seconds


FAULTS: dict[str, Callable[[Any, Any], None]] = {
    "kill": kill, "stop": stop, "slow": slow, "nonfinite": nonfinite, "flip": flip, "full_disk": full_disk, "slow_disk": slow_disk,
    "unreadable": unreadable, "lost_node": kill, "clock": clock, "corrupt": corrupt, "spike": spike, "memory": memory,
}  # fmt: skip
LASTING = ("slow",)  # called at each step from the first one on
EARLY = ("nonfinite", "corrupt", "spike")  # called before the first step
EVERYWHERE = ("unreadable",)  # every rank takes part (waiting for the save); the first one acts
