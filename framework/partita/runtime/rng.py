"""Random numbers: streams by name, and the state of all generators of a process."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def name_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on seed and name only (SHA-256 of both)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def get_rng_state() -> dict[str, Any]:
    """State of Python's, numpy's, torch's and the accelerator's generators, JSON-able."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    kind_of = _accelerator()
    if kind_of:
        state[kind_of] = _encode(torch.get_device_module(kind_of).get_rng_state())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The counterpart of `get_rng_state`. A device's state counts where the same kind of device is in use."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    kind_of = _accelerator()
    if kind_of in state:
        torch.get_device_module(kind_of).set_rng_state(_decode(state[kind_of]))


def _accelerator() -> str | None:
    """Device type of the accelerator in use, if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else None


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
