"""Kernel tests run in one of four settings, by the variable PARTITA_KERNEL_TESTS:

unset        CPU paths and plain torch (the ordinary run; test_processes.py starts the next two in processes of their own)
interpreter  Triton's interpreter on CPU tensors, every access checked
compile      no device: launchers compile for several GPUs
device       Triton on this machine's accelerator
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
SETTING = os.environ.get("PARTITA_KERNEL_TESTS", "")
ANYWHERE = ["test_updates.py", "test_layers.py", "test_wire.py", "test_moe.py", "test_attention.py"]
WANTED = {
    "": [*ANYWHERE, "test_native.py", "test_processes.py", "test_operations.py", "test_tuning.py"],
    "interpreter": [*ANYWHERE, "test_sanitizer.py", "test_liger.py"],
    "compile": ["test_compile.py"],
    "device": [*ANYWHERE, "test_operations.py", "test_liger.py"],
}[SETTING]
collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name not in WANTED]

if SETTING == "interpreter":
    # Triton reads it when kernels are decorated, its own included: before it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import torch

import partita_kernels
from partita_kernels import dispatch

if SETTING == "interpreter":
    import bfloat16

    bfloat16.install()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In the ordinary run each test of `device` runs on the CPU paths and on plain torch."""
    if "device" in metafunc.fixturenames:
        modes = {"": ["auto", "reference"], "interpreter": ["triton"], "device": ["auto"], "compile": []}[SETTING]
        metafunc.parametrize("device", modes, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under the interpreter, which is slow, the ordinary run takes two combinations of each test's parameters: `make kernels` takes all."""
    if SETTING != "interpreter" or os.environ.get("PARTITA_LONG_TESTS"):
        return
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for group in of_test.values() for item in (group[0], group[-1])}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


@pytest.fixture
def device(request, fresh_seed):
    """The device of tensors, with the implementation chosen and random numbers seeded."""
    torch.manual_seed(fresh_seed)
    with partita_kernels.using(request.param):
        if SETTING == "interpreter":
            from sanitizer import sanitize

            with sanitize():
                yield torch.device("cpu")
        else:
            found = torch.accelerator.current_accelerator() if SETTING == "device" else None
            yield found or torch.device("cpu")


@pytest.fixture
def fresh_seed(record_property) -> int:
    """New at each run; shown with a failure and kept in the report."""
    seed = int(os.environ.get("PARTITA_TEST_SEED") or secrets.randbelow(1 << 31))
    print(f"PARTITA_TEST_SEED={seed} repeats this")
    record_property("seed", seed)
    return seed


@pytest.fixture
def small_blocks(monkeypatch):
    """`small_blocks(module, size)`: its Triton kernels work on blocks (or tiles) of this size, so that small tensors need several."""

    def shrink(module: str, size: int | tuple[int, ...], name: str = "block") -> None:
        dispatch.load_all()
        for operation in dispatch.OPERATIONS.values():
            fn = operation.triton
            if fn and fn.__module__ == f"partita_kernels.{module}" and name in inspect.signature(fn).parameters:
                monkeypatch.setattr(operation, "triton", functools.partial(fn, **{name: size}))

    return shrink
