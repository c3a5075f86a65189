"""Ranks that somebody else has started: torchrun, Slurm's srun, or anything that sets torch's variables."""

from __future__ import annotations

import os
import re

from partita.errors import ConfigError


def joined() -> str | None:
    """Who started this process as one rank of several: `torchrun`, `slurm`, `environment` (RANK, WORLD_SIZE), or None: nobody."""
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        return "torchrun"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "environment"
    # A batch script without srun has SLURM_PROCID too, but is no step of several tasks.
    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "slurm"
    return None


def adopt() -> None:
    """Set the variables that torch reads where Slurm has set its own; the first node of the step is the meeting point."""
    if joined() != "slurm":
        return
    env = os.environ
    nodes = hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost"))
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    env.setdefault("RANK", env["SLURM_PROCID"])
    env.setdefault("WORLD_SIZE", str(tasks))
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    env.setdefault("LOCAL_WORLD_SIZE", str(-(-tasks // len(nodes))))
    env.setdefault("MASTER_ADDR", nodes[0])
    # Steps of one job must not meet each other; ports below the ephemeral range.
    env.setdefault(
        "MASTER_PORT", str(20000 + (int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", "0"))) % 12000)
    )


def check_joined(spawner: str, ranks: int, multirun: bool) -> None:
    """Raises ConfigError where the processes that were started can't carry out the run."""
    if multirun:
        raise ConfigError(
            f"-m (multirun) can't run under {spawner}: each job needs ranks of its own\n"
            "    -> start one process without it; Partita starts the ranks of each job"
        )
    world = int(os.environ["WORLD_SIZE"])
    if world != ranks:
        raise ConfigError(
            f"{spawner} started {world} processes, and the plan is for {ranks} ranks\n"
            f"    -> start {ranks} processes, or choose parallel degrees whose product is {world}"
        )


def hosts(text: str) -> list[str]:
    """Names in Slurm's notation: `n1,gpu[01-03,7]` is n1, gpu01, gpu02, gpu03, gpu7."""
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        found += _expand(part)
    return found


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    head, tail = part[: match.start()], part[match.end() :]
    names = []
    for piece in match.group(1).split(","):
        low, _, high = piece.partition("-")
        numbers = [str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)] if high else [low]
        names += [full for number in numbers for full in _expand(f"{head}{number}{tail}")]
    return names
