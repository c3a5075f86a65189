"""Where ranks that torchrun started meet. Its store outlives them: after a restart it still has the addresses of ranks that are gone."""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

PAUSE = 0.01  # seconds between looks


def meeting_store(rank: int, world: int, limit: timedelta) -> Store | None:
    """A part of torchrun's store that no earlier start has written to; None where the ranks have a store of their own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False, timeout=limit)
    return PrefixStore(agree_on_start(PrefixStore("partita", shared), rank, world, limit.total_seconds()), shared)


def agree_on_start(store: Store, rank: int, world: int, limit: float) -> str:
    """A name of this start that all ranks share, in a store that may be full of what earlier starts said.

    Rank 0 makes it up, and answers each rank's question with it; a question has a random word in it, which old answers don't have.
    (The number of restarts would not do: the agents of several nodes count differently.) Raises TimeoutError after `limit` seconds.
    """
    end = time.monotonic() + limit
    return _answer(store, world, end) if rank == 0 else _ask(store, rank, end)


def _answer(store: Store, world: int, end: float) -> str:
    name, answered, waiting = secrets.token_hex(8), dict[int, str](), set(range(1, world))
    while waiting:
        for rank in sorted(waiting):
            question = _peek(store, f"question/{rank}")
            if question and answered.get(rank) != question:
                store.set(f"answer/{rank}", f"{question} {name}")
                answered[rank] = question
            if _peek(store, f"known/{rank}") == name:
                waiting.discard(rank)
        _pause(end, f"ranks {sorted(waiting)[:8]} have not come")
    return name


def _ask(store: Store, rank: int, end: float) -> str:
    question = secrets.token_hex(8)
    store.set(f"question/{rank}", question)
    while not (answer := _peek(store, f"answer/{rank}")).startswith(question):
        _pause(end, "rank 0 has not come")
    name = answer.split()[1]
    store.set(f"known/{rank}", name)
    return name


def _peek(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _pause(end: float, why: str) -> None:
    if time.monotonic() > end:
        raise TimeoutError(f"the ranks could not meet: {why}")
    time.sleep(PAUSE)
