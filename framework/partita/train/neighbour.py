"""Copies of snapshots for a rank of the next node, sent in the background over a connection of its own: no collective waits for them."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any

import torch.distributed as dist

from partita.errors import CheckpointError

log = logging.getLogger("partita")
TIMEOUT = 120.0  # seconds without a byte after which a copy has failed
_LENGTH = struct.Struct("<Q")
_TAKEN = b"+"
Receive = Callable[["Parcel"], tuple[memoryview, Callable[[], None]]]


@dataclass(frozen=True)
class Parcel:
    """What is sent before the bytes. snapshot: its name. keep: that of the one that must stay. rank: whose part it is. document, part: texts of its two documents."""

    snapshot: str
    keep: str
    rank: int
    size: int
    document: str
    part: str


class Neighbour:
    """Sends this rank's parts to one rank of the next node, and takes those of ranks of the node before. Making one is collective.

    nodes: the node of each rank. receive: of a parcel, where its bytes go, and what to call when they are there.
    """

    def __init__(self, rank: int, nodes: Sequence[str], receive: Receive) -> None:
        targets = [neighbour_of(r, nodes) for r in range(len(nodes))]
        self.sources = [r for r, t in enumerate(targets) if t == rank]
        self._receive = receive
        self._server = socket.create_server(("", 0))
        everyone = gathered((own_address(), self._server.getsockname()[1], secrets.token_hex(16)), len(nodes))
        self._token = everyone[rank][2]
        self._target = everyone[targets[rank]]
        self._thread = Thread(target=self._serve, name="partita-neighbour", daemon=True)
        self._thread.start()

    def send(self, parcel: Parcel, data: memoryview) -> None:
        """Returns when the neighbour has all of it. Raises CheckpointError."""
        host, port, token = self._target
        try:
            with socket.create_connection((host, port), timeout=TIMEOUT) as line:
                head = json.dumps({"token": token, **asdict(parcel)}).encode()
                line.sendall(_LENGTH.pack(len(head)) + head)
                line.sendall(data)
                if line.recv(1) != _TAKEN:
                    raise CheckpointError(f"the neighbour at {host}:{port} did not take the copy; its log says why")
        except OSError as error:
            raise CheckpointError(f"the copy could not be sent to the neighbour at {host}:{port}: {error}") from error

    def _serve(self) -> None:
        """Take one parcel after the other."""
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:  # closed
                return
            with line:
                line.settimeout(TIMEOUT)
                try:
                    self._take(line)
                except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
                    log.warning("a copy of another rank's snapshot could not be taken: %s", error)

    def _take(self, line: socket.socket) -> None:
        head = json.loads(_exactly(line, _LENGTH.unpack(_exactly(line, _LENGTH.size))[0]))
        if not secrets.compare_digest(str(head.pop("token")), self._token):
            raise ValueError("a stranger called")
        parcel = Parcel(**head)
        if parcel.rank not in self.sources or "/" in parcel.snapshot:
            raise ValueError(f"rank {parcel.rank} is not one that this rank keeps copies for")
        target, done = self._receive(parcel)
        _fill(line, target)
        done()
        line.sendall(_TAKEN)

    def close(self) -> None:
        """Take no more."""
        self._server.close()


def gathered(value: Any, world: int) -> list[Any]:
    """Everybody's value, in rank order. Collective."""
    everyone: list[Any] = [value] * world
    if world > 1:
        dist.all_gather_object(everyone, value)
    return everyone


def neighbour_of(rank: int, nodes: Sequence[str]) -> int:
    """The rank of the next node that keeps copies of `rank`'s parts: the one at the same place there, as far as it has as many."""
    names = list(dict.fromkeys(nodes))
    mine = [r for r, node in enumerate(nodes) if node == nodes[rank]]
    after = names[(names.index(nodes[rank]) + 1) % len(names)]
    theirs = [r for r, node in enumerate(nodes) if node == after]
    return theirs[mine.index(rank) % len(theirs)]


def own_address() -> str:
    """The address of this host as seen on the way to the first node (no packet is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _exactly(line: socket.socket, size: int) -> bytes:
    if size > 1 << 30:
        raise ValueError(f"a document of {size} bytes")
    data = bytearray(size)
    _fill(line, memoryview(data))
    return bytes(data)


def _fill(line: socket.socket, target: memoryview) -> None:
    while target:
        done = line.recv_into(target)
        if not done:
            raise OSError("the connection ended early")
        target = target[done:]
