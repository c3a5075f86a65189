"""Nodes that are not there: network namespaces of this machine, joined by links of a chosen rate. Linux, with the right to make them.

    with Network(nodes=2, rate=50e6) as network:                     # bytes/s that a node can send
        network.run([sys.executable, "scripts/train.py", ...], ranks=2)   # 2 ranks in each node, with torchrun's variables

Each namespace lives as long as a holder process does, and the holder as long as a pipe from this process is open: whatever ends this
process, a kill included, takes namespaces, links and the started processes along. Nothing is made in the machine's own network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

LINK = "partita0"  # the interface of every node
SUBNET = "10.77.0"  # a node's last byte is its number + 1
BURST = 128 * 1024  # bytes that pass at once; a segment that the kernel sends in one piece must fit
QUEUE = 16 * 1024 * 1024  # bytes that may wait for their turn; TCP keeps far less there, so nothing is lost
GRACE = 4.0  # seconds that other ranks get to report, too, after a first failure
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


class Unavailable(RuntimeError):
    """Why no network can be made here."""


@cache
def unavailable() -> str:
    """Why networks can't be made here, or nothing; found out by making one."""
    try:
        with Network(2, rate=1e9):
            return ""
    except Unavailable as reason:
        return str(reason)


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its rank, exit status, and what it wrote to stdout and stderr together."""

    rank: int
    status: int
    output: str


class Network:
    """A context: `nodes` namespaces that reach each other, each with a link of `rate` bytes/s for what it sends (None: as fast as it goes).

    Raises Unavailable where that isn't permitted, or ip, tc, nsenter or unshare are missing.
    """

    def __init__(self, nodes: int = 2, rate: float | None = None) -> None:
        self.nodes, self._rate = nodes, rate
        self._holders: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ the network

    def _make(self) -> None:
        if sys.platform != "linux":
            raise Unavailable(f"network namespaces are Linux's, and this is {sys.platform}")
        missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
        if missing:
            raise Unavailable(f"{', '.join(missing)} not found (packages iproute2 and util-linux)")
        self._holders = [_holder(f"node{i}") for i in range(self.nodes)]
        if self.nodes == 2:
            _run("ip", "link", "add", LINK, "netns", self._pid(0), "type", "veth", "peer", "name", LINK, "netns", self._pid(1))
        else:
            self._switch()
        for node in range(self.nodes):
            # no address of IPv6: it would take a second to settle, and might be chosen
            self._in(node, "ip", "link", "set", LINK, "addrgenmode", "none")
            self._in(node, "ip", "address", "add", f"{self.address(node)}/24", "dev", LINK)
            self._in(node, "ip", "link", "set", LINK, "up")
        self.set_rate(self._rate)

    def _switch(self) -> None:
        """A namespace more, in which a bridge joins the links of all nodes."""
        self._holders.append(_holder("switch"))
        last = self.nodes
        self._in(last, "ip", "link", "add", "bridge0", "type", "bridge")
        self._in(last, "ip", "link", "set", "bridge0", "up")
        for node in range(self.nodes):
            ends = (LINK, "netns", self._pid(node), "type", "veth", "peer", "name", f"port{node}", "netns", self._pid(last))
            _run("ip", "link", "add", *ends)
            self._in(last, "ip", "link", "set", f"port{node}", "master", "bridge0", "up")

    def set_rate(self, rate: float | None) -> None:
        """Change what each node can send, bytes/s, also while ranks run. None: no limit."""
        for node in range(self.nodes):
            self._in(node, *rate_command(rate))

    def address(self, node: int) -> str:
        """The node's address."""
        return f"{SUBNET}.{node + 1}"

    def sent(self, node: int) -> int:
        """Bytes that the node has sent to others, as the kernel counts them (headers included)."""
        table = self._in(node, "cat", "/proc/net/dev")
        line = next(line for line in table.splitlines() if line.strip().startswith(LINK + ":"))
        return int(line.split(":")[1].split()[8])

    def namespace(self, node: int) -> Path:
        """A file for `inside`."""
        return Path(f"/proc/{self._pid(node)}/ns/net")

    def _pid(self, node: int) -> str:
        return str(self._holders[node].pid)

    def _in(self, node: int, *command: str) -> str:
        return _run("nsenter", "-t", self._pid(node), "-n", *command)

    # ------------------------------------------------------------------ processes

    def environment(self, node: int, local: int, ranks: int) -> dict[str, str]:
        """What torchrun would set for rank `local` of `ranks` in a node, and which interface gloo takes."""
        return {
            "RANK": str(node * ranks + local),
            "WORLD_SIZE": str(self.nodes * ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",  # the namespace is new: every port is free
            "GLOO_SOCKET_IFNAME": LINK,
        }

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> subprocess.Popen[str]:
        """A process in a node, with the node's host name; it dies with this one. output: as `stdout` of Popen, for both streams."""
        enter = ("nsenter", "-t", self._pid(node), "-n", "-u", "--")
        process = subprocess.Popen(
            [*enter, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._started.append(process)
        return process

    def run(
        self, command: Sequence[str], ranks: int, timeout: float, environment: Mapping[str, str] | None = None
    ) -> list[Ended]:
        """`command` as `ranks` ranks in every node, to its end; in rank order. Raises TimeoutError with what they wrote."""
        files = []
        with contextlib.ExitStack() as stack:
            processes = []
            for rank in range(self.nodes * ranks):
                file = stack.enter_context(open(os.memfd_create(f"rank{rank}"), "w+"))
                variables = {**self.environment(rank // ranks, rank % ranks, ranks), **(environment or {})}
                processes.append(self.start(rank // ranks, command, variables, file.fileno()))
                files.append(file)
            late = not _wait(processes, timeout)
            _end(processes)
            ended = []
            for rank, (process, file) in enumerate(zip(processes, files, strict=True)):
                file.seek(0)
                ended.append(Ended(rank, process.returncode, file.read()))
        if late:
            told = "\n".join(f"rank {e.rank} ({e.status}):\n{e.output[-2000:]}" for e in ended)
            raise TimeoutError(f"ranks were not done within {timeout:g} s\n{told}")
        return ended

    def close(self) -> None:
        """End all processes and the network."""
        _end(self._started)
        for holder in self._holders:
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.close()
            holder.stdout.close()
        for holder in self._holders:
            try:
                holder.wait(5)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
        self._holders = []


def rate_command(rate: float | None) -> list[str]:
    """The command that, in a node, limits what it sends to `rate` bytes/s."""
    if rate is None:
        return ["tc", "qdisc", "replace", "dev", LINK, "root", "pfifo"]
    limits = ("rate", f"{round(8 * rate)}bit", "burst", str(BURST), "limit", str(QUEUE))
    return ["tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *limits]


@contextlib.contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """This thread in another network namespace: sockets that it makes, and threads that it starts, belong there."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(namespace, os.O_RDONLY)
    try:
        _set(libc.setns, there)
        try:
            yield
        finally:
            _set(libc.setns, home)
    finally:
        os.close(there)
        os.close(home)


def _set(setns: Callable[[int, int], int], handle: int) -> None:
    if setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before any fork


def die_with_parent() -> None:
    """In a new process: be killed when the thread that made it ends."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _holder(name: str) -> subprocess.Popen[str]:
    """A process in a namespace of its own that ends when its standard input does."""
    script = f"hostname {name} && ip link set lo up && echo ready && exec cat"
    made = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert made.stdout is not None and made.stdin is not None
    said = made.stdout.readline().strip()
    if said != "ready":
        made.stdin.close()
        made.wait(5)
        raise Unavailable(
            f"no network namespace: {said or 'unshare ended'} (needs root, or the capabilities NET_ADMIN and SYS_ADMIN)"
        )
    return made


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _wait(processes: Sequence[subprocess.Popen[str]], timeout: float) -> bool:
    """Until all have ended (True), or one has failed and the others had a moment more, or time is up."""
    end = time.monotonic() + timeout
    failed = False
    while time.monotonic() < end:
        states = [p.poll() for p in processes]
        if all(s is not None for s in states):
            return True
        if any(states) and not failed:
            failed, end = True, min(end, time.monotonic() + GRACE)
        time.sleep(0.05)
    return failed


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
