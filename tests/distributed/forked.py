"""Python scripts in processes of their own, forked from one that has made the imports already: a start costs a tenth of a second.

`start([script, *arguments], out=..., err=...)` is `subprocess.Popen([sys.executable, script, *arguments])`: a new process in a session
(or process group) of its own, with the given environment and output in files. Where an accelerator is found, or on request, a new
interpreter is started instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pool import die_with_parent

ROOT = Path(__file__).parents[2]
TICK = 0.01  # seconds between looks at what has ended
PLANNING = ("train.py", "plan.py", "kills.py", "faults.py")  # scripts that make plans, which takes more imports


class Forked:
    """A process that was started; as much of subprocess.Popen as tests ask for."""

    def __init__(self, server: _Server, pid: int, command: Sequence[str]) -> None:
        self.pid, self.args, self._server = pid, list(command), server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status (negative: by a signal), None while it runs."""
        if self.returncode is None:
            self._server.look()
            self.returncode = self._server.ended.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(TICK)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """To the process alone, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it, and all that is left of its session or group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def start(
    command: Sequence[str],
    *,
    out: Path,
    err: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    session: bool = True,
    fresh: bool = False,
) -> Forked:
    """Start `python command...`. err: default: as `out`. session: false: a process group only. fresh: in a new interpreter.

    Both files are appended to; the input is empty.
    """
    return _server().start(
        {
            "command": [str(word) for word in command],
            "out": str(out),
            "err": str(err or out),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "session": session,
            "fresh": fresh,
        }
    )


# ------------------------------------------------------------------ the test's side


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        self.owner = os.getpid()
        self.ended: dict[int, int] = {}
        self._line = Connection(mine.detach())
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        theirs.close()

    def start(self, request: dict[str, object]) -> Forked:
        """Ask for a process, and wait until it is there."""
        self._line.send_bytes(json.dumps(request).encode())
        while True:
            kind, pid, status = json.loads(self._line.recv_bytes())
            if kind == "started":
                return Forked(self, pid, request["command"])  # type: ignore[arg-type]
            self.ended[pid] = status

    def look(self) -> None:
        """Take in what has ended."""
        while self._line.poll():
            _, pid, status = json.loads(self._line.recv_bytes())
            self.ended[pid] = status

    def close(self) -> None:
        """End it (in the process that made it only)."""
        if os.getpid() == self.owner:
            self._line.close()
            self._process.kill()
            self._process.wait(5)


_made: list[_Server] = []


def _server() -> _Server:
    if not _made or _made[0].owner != os.getpid():
        _made[:] = [_Server()]
        atexit.register(_made[0].close)
    return _made[0]


# ------------------------------------------------------------------ the server's side


def _serve(line: Connection, can_fork: bool) -> dict[str, object] | None:
    """Fork for each request. Returns it in the process that was forked, None at the end of the tests."""
    running = 0
    while True:
        ready, _, _ = select.select([line], [], [], TICK if running else None)
        if ready:
            try:
                request = json.loads(line.recv_bytes())
            except (EOFError, OSError):
                return None
            if can_fork and Path(request["command"][0]).name in PLANNING and not request["fresh"]:
                _make_a_plan()
            seen, ready_made = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(seen)
                line.close()
                return {**request, "made": ready_made}
            os.close(ready_made)
            os.read(seen, 1)  # ends when the process has its group and its files
            os.close(seen)
            running += 1
            line.send_bytes(json.dumps(["started", pid, 0]).encode())
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                running -= 1
                line.send_bytes(json.dumps(["ended", found[0], os.waitstatus_to_exitcode(found[1])]).encode())


def _become(request: dict[str, object], fork: bool) -> None:
    """Do what the interpreter does for a script."""
    die_with_parent()
    os.setsid() if request["session"] else os.setpgid(0, 0)
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, request["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        handle = os.open(str(path), flags, 0o644)
        os.dup2(handle, target)
        os.close(handle)
    os.chdir(str(request["cwd"]))
    os.close(request["made"])  # type: ignore[arg-type]
    env: dict[str, str] = request["env"]  # type: ignore[assignment]
    command: list[str] = request["command"]  # type: ignore[assignment]
    if not fork or request["fresh"] or command[0].startswith("-"):
        os.execve(sys.executable, [sys.executable, *command], env)
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    _end(_run(command[0]))


def _run(script: str) -> int:
    """The exit status, as the interpreter finds it."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """What the interpreter does at its end, but for taking all apart: that would copy the memory shared with the server."""
    threading._shutdown()  # type: ignore[attr-defined]  # threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _may_fork() -> bool:
    """Import what all runs import; whether processes may be forked from this one then."""
    import torch

    if torch.accelerator.is_available():
        return False
    torch.set_num_threads(1)  # no pool of threads, which forks would lack
    import partita.runtime.launch  # noqa: F401

    return True


@functools.cache
def _make_a_plan() -> None:
    """For the imports that it makes."""
    import partita.train.loop  # noqa: F401
    from partita.cli import plan

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        plan(["data=synthetic", "model.layers=2", "model.width=32", "model.heads=2", "parallel.data=2", "tracker=none"])


if __name__ == "__main__":
    die_with_parent()
    can_fork = _may_fork()
    asked = _serve(Connection(int(sys.argv[1])), can_fork)
    if asked is not None:
        _become(asked, can_fork)
