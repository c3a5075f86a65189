"""A pool of gloo ranks that lives as long as the test session.

`run_ranks(world, fn, *args)` calls `fn(rank, world, *args)` on every rank inside a fresh process group and returns the
results in rank order. One process imports torch once; ranks are forked from it (no thread of torch has run there), so that
starting or replacing a rank takes milliseconds. A rank that fails or hangs costs all ranks; the next call gets new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 1.0  # seconds that the other ranks get to report, too, after a first failure


class RankError(RuntimeError):
    """A rank failed. `rank` names the first one; the cause is its exception where that could be pickled."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60, kwargs: dict[str, Any] | None = None
) -> list[Any]:
    """Results of `fn(rank, world, *args, **kwargs)` on ranks 0 to world-1, with torch.distributed (gloo) initialised.

    fn: a function of a module that lies in a file (a test module will do). Arguments and results are pickled. Each rank has
    one thread, the caller's environment and working directory. Raises RankError with rank and traceback, or, after `timeout`
    seconds, with the stacks of the ranks that hang.
    """
    return _pool().run(world, fn, args, kwargs or {}, timeout)


# ------------------------------------------------------------------ the test's side


class _Pool:
    """The process that forks ranks, and the ranks there are."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="partita_pool_")
        self.folder = Path(self._folder.name)
        self._line, theirs = socket.socketpair()
        with (self.folder / "zygote.log").open("w") as log:
            self._zygote = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(self.folder)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is pytest's business
            )
        theirs.close()
        self._ranks: list[tuple[int, Connection]] = []
        self._calls = 0
        self.owner = os.getpid()

    def run(self, world: int, fn: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> list[Any]:
        """One call on all ranks."""
        while len(self._ranks) < world:
            self._ranks.append(self._fork(len(self._ranks)))
        self._calls += 1
        store = str(self.folder / f"store{self._calls}")
        call = {
            "world": world,
            "store": store,
            "timeout": timeout,
            "path": list(sys.path),
            "environ": dict(os.environ),
            "cwd": os.getcwd(),
            "module": (fn.__module__, sys.modules[fn.__module__].__file__),
            "name": fn.__qualname__,
            "payload": pickle.dumps((args, kwargs)),
        }
        message = pickle.dumps(call)
        for rank, (_, line) in enumerate(self._ranks[:world]):
            with contextlib.suppress(BrokenPipeError):  # a rank that is gone is found when its answer is awaited
                line.send_bytes(pickle.dumps(rank) + message)
        answers = self._collect(world, timeout)
        bad = {r: a for r, a in answers.items() if a[0] != "done"}
        if bad or len(answers) < world:
            raise self._failure(world, answers, timeout)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(store)
        return [pickle.loads(answers[rank][1]) for rank in range(world)]

    def _fork(self, rank: int) -> tuple[int, Connection]:
        mine, theirs = socket.socketpair()
        try:
            socket.send_fds(self._line, [str(rank).encode().ljust(8)], [theirs.fileno()])
            pid = self._line.recv(16)
        except OSError:
            pid = b""
        theirs.close()
        if not pid:
            raise RuntimeError("the process that forks ranks is gone:\n" + (self.folder / "zygote.log").read_text())
        return int(pid), Connection(mine.detach())

    def _collect(self, world: int, timeout: float) -> dict[int, tuple[Any, ...]]:
        """Answers by rank, until all are there, time is up, or a rank has failed and the others had a moment more."""
        by_line = {line: rank for rank, (_, line) in enumerate(self._ranks[:world])}
        answers: dict[int, tuple[Any, ...]] = {}
        end = time.monotonic() + timeout
        while by_line and time.monotonic() < end:
            for line in wait(list(by_line), timeout=end - time.monotonic()):
                assert isinstance(line, Connection)
                rank = by_line.pop(line)
                try:
                    answers[rank] = pickle.loads(line.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = ("gone", "the process ended without an answer")
                if answers[rank][0] != "done":
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _failure(self, world: int, answers: dict[int, tuple[Any, ...]], timeout: float) -> RankError:
        """The error to raise; all ranks of the call are ended."""
        bad = [rank for rank, answer in answers.items() if answer[0] != "done"]
        silent = [rank for rank in range(world) if rank not in answers]
        stacks = self._stacks(silent)
        self._end()
        parts = [f"rank {rank} of {world}: {answers[rank][1]}" for rank in bad]
        what = "still busy when another failed" if bad else f"no answer within {timeout:g} s"
        parts += [f"rank {rank} of {world}: {what}; it was at\n{stacks[rank]}" for rank in silent]
        first = bad[0] if bad else silent[0]
        parts.append(f"output of rank {first}:\n{self._output(first)}")
        error = RankError(first, "\n".join(parts))
        if bad and len(answers[first]) > 2:
            error.__cause__ = _unpickle(answers[first][2])
        return error

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where ranks are, written by their fault handlers."""
        files = {rank: self.folder / f"rank{rank}.stack" for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank][0], signal.SIGUSR1)
        if ranks:
            time.sleep(0.3)
        return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}

    def _output(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")[-3000:]

    def _end(self) -> None:
        # all of them: a rank is known by its position
        for pid, line in self._ranks:
            line.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._ranks = []

    def close(self) -> None:
        """End everything (in the process that made the pool only)."""
        if os.getpid() == self.owner:
            for pid, line in self._ranks:
                line.close()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._line.close()
            self._zygote.kill()
            self._zygote.wait(5)
            self._folder.cleanup()


_made: list[_Pool] = []


def _pool() -> _Pool:
    if not _made or _made[0].owner != os.getpid():
        _made[:] = [_Pool()]
        atexit.register(_made[0].close)
    return _made[0]


def _unpickle(data: bytes) -> BaseException | None:
    with contextlib.suppress(Exception):
        error = pickle.loads(data)
        return error if isinstance(error, BaseException) else None
    return None


# ------------------------------------------------------------------ the ranks' side


def _zygote(line: socket.socket, folder: Path) -> None:
    """Import torch, then fork a rank for each request; ends when the test session does."""
    die_with_parent()
    import torch.distributed  # noqa: F401  the one expensive import

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        message, fds, _, _ = socket.recv_fds(line, 8, 1)
        if not message:
            return
        rank = int(message)
        pid = os.fork()
        if pid == 0:
            line.close()
            _rank(rank, Connection(fds[0]), folder)
            os._exit(0)
        os.close(fds[0])
        line.sendall(str(pid).encode().ljust(16))


def _rank(rank: int, line: Connection, folder: Path) -> None:
    """Serve calls until the session ends."""
    import torch

    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = (folder / f"rank{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    while True:
        try:
            data = line.recv_bytes()
        except EOFError:
            return
        answer = _answer(data)
        try:
            line.send_bytes(pickle.dumps(answer))
        except (BrokenPipeError, OSError):
            return


def _answer(data: bytes) -> tuple[Any, ...]:
    try:
        head = len(pickle.dumps(pickle.loads(data)))
        return ("done", pickle.dumps(_call(pickle.loads(data), pickle.loads(data[head:]))))
    except BaseException as error:
        try:
            kept = pickle.dumps(error)
        except Exception:
            kept = b""
        return ("failed", "".join(traceback.format_exception(error)), kept)


def _call(rank: int, call: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = call["path"]
    os.environ.clear()
    os.environ.update(call["environ"])
    os.chdir(call["cwd"])
    fn: Any = _module(*call["module"])
    for name in call["name"].split("."):
        fn = getattr(fn, name)
    args, kwargs = pickle.loads(call["payload"])
    torch.manual_seed(0)
    store = dist.FileStore(call["store"], call["world"])
    limit = timedelta(seconds=call["timeout"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=call["world"], timeout=limit)
    with _restored():
        result = fn(rank, call["world"], *args, **kwargs)
    if dist.is_initialized():
        dist.barrier()  # nobody takes its sockets down while another still reads
        dist.destroy_process_group()
        # what the test built refers to its groups in cycles, and each group has threads that wake up a hundred times a second
        gc.collect()
    return result


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """What a test sets for the whole process doesn't reach the next one (a failing test costs the process anyway)."""
    import torch

    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # imports much


def _module(name: str, file: str | None) -> Any:
    """A module by name, or from its file where its name can't be imported (pytest's importlib mode)."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ImportError:
        if file is None:
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def die_with_parent() -> None:
    """Linux: a kill when the parent dies (prctl PR_SET_PDEATHSIG is 1)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    _zygote(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
