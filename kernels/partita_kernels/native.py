"""C++ for CPU paths: compiled with the machine's own compiler at first use, kept on disk, loaded through ctypes.

A library is named by the hash of its sources, the compiler and the CPU's features, so that different machines can share a cache.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
# Without -ffast-math: NaN and Inf have to pass through, and results must not depend on where a range is cut.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
COMPILE_SECONDS = 180
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_DTYPE = 3


def cache_dir() -> Path:
    """$PARTITA_NATIVE_CACHE, else partita/native in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("PARTITA_NATIVE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "partita" / "native"


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of native/<name>.cpp; None where it can't be built, which the log says once: callers then use torch."""
    try:
        return ctypes.CDLL(str(build(name)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("no native kernels for %s, torch operations are used instead: %s", name, str(detail).strip()[:500])
        return None


def build(name: str) -> Path:
    """Path of the compiled library; compiles it if it isn't in the cache. Raises OSError or SubprocessError.

    Any number of processes may call this at once: one compiles, the others wait for it.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise OSError(f"no C++ compiler {os.environ.get('CXX', 'g++')!r} on PATH (set CXX)")
    source = SOURCES / f"{name}.cpp"
    target = cache_dir() / f"{name}-{_key(source, compiler)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, source, target)
    return target


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Compile beside the target and rename: a library is whole or absent."""
    descriptor, scratch = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    try:
        command = [compiler, *FLAGS, str(source), "-o", scratch]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        os.replace(scratch, target)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _key(source: Path, compiler: str) -> str:
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(SOURCES.glob("*.h")):
        digest.update(header.read_bytes())
    digest.update(" ".join(FLAGS).encode() + _version(compiler) + _cpu())
    return digest.hexdigest()[:20]


@functools.cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30).stdout


@functools.cache
def _cpu() -> bytes:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    kept = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
    return "\n".join([platform.machine(), *dict.fromkeys(kept)]).encode()


double = ctypes.c_double
single = ctypes.c_float
word = ctypes.c_uint32
integer = ctypes.c_int64


def threads() -> ctypes.c_int:
    """As many as torch uses."""
    return ctypes.c_int(torch.get_num_threads())


def pointers(tensors: Sequence[torch.Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Array of data pointers; null for None."""
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Data pointer; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def lengths(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_int64]:
    """Array of element counts."""
    return (ctypes.c_int64 * len(tensors))(*[t.numel() for t in tensors])


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Array of 64-bit integers."""
    return (ctypes.c_int64 * len(values))(*values)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """Array of doubles."""
    return (ctypes.c_double * len(values))(*values)
