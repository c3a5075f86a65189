"""Chains of messages that go on by themselves, and the log of what was sent."""

from __future__ import annotations

import sys
import threading
import time
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from partita.runtime import traffic as traffic_module
from partita.runtime.mesh import Group
from partita.runtime.relay import Relay
from partita.runtime.traffic import Tally, Traffic, sending, sending_among, sent, sent_among, watch
from partita.runtime.transport import All, LoggedTransport, Transport
from partita.train.communication import CommunicationLog

CPU = torch.device("cpu")


class Message:
    """Arrives when it is told to."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def arrive(self) -> None:
        self.arrived.set()
        self.future.set_result(None)

    def wait(self) -> None:
        assert self.arrived.wait(5)

    def get_future(self) -> torch.futures.Future[None]:
        return self.future


def test_a_chain_goes_on_while_nobody_waits() -> None:
    relay, messages, order = Relay(), [Message() for _ in range(3)], []

    def step(i: int):  # type: ignore[no-untyped-def]
        def start() -> Message:
            order.append(i)
            return messages[i]

        return start

    done = threading.Event()
    chain = relay.start([step(i) for i in range(3)], done.set)
    assert order == [0]
    for message in messages:
        message.arrive()
    assert done.wait(5) and order == [0, 1, 2]
    chain.wait()
    relay.close()


def test_second_messages_leave_in_the_order_of_the_chains() -> None:
    """Whatever arrives first: the order must be that of all other ranks."""
    relay, firsts, order = Relay(), [Message() for _ in range(4)], []
    arrived = Message()
    arrived.arrive()

    def second(i: int) -> Message:
        order.append(i)
        return arrived

    chains = [relay.start([lambda i=i: firsts[i], lambda i=i: second(i)]) for i in range(4)]  # type: ignore[misc]
    for message in reversed(firsts):
        message.arrive()
    for chain in chains:
        chain.wait()
    assert order == [0, 1, 2, 3]


def test_what_a_step_raises_reaches_whoever_waits() -> None:
    relay, first = Relay(), Message()

    def fails() -> Message:
        raise RuntimeError("no route")

    chain = relay.start([lambda: first, fails])
    after = relay.start([lambda: first])
    first.arrive()
    with pytest.raises(RuntimeError, match="no route"):
        chain.wait()
    after.wait()  # the thread lives on


def test_time_is_counted_once_however_many_messages_are_under_way() -> None:
    traffic, messages = Traffic(), [Message(), Message()]
    for _ in messages:
        traffic.begin("gradients", 1000)
    works = [traffic.under_way("gradients", m, [torch.empty(1)]) for m in messages]
    time.sleep(0.05)
    messages[0].arrive()
    time.sleep(0.05)
    messages[1].arrive()
    time.sleep(0.1)  # nobody waits yet: neither under way nor exposed
    for work in works:
        work.wait()
    tally = traffic.take()["gradients"]
    assert (tally.calls, tally.bytes) == (2, 2000)
    assert 0.1 <= tally.seconds < 0.18 and tally.exposed < 0.05
    assert traffic.take() == {}


class Late(Message):
    """Arrives 50 ms after somebody has begun to wait."""

    def wait(self) -> None:
        time.sleep(0.05)


def test_waiting_is_exposed_in_the_thread_that_computes_only() -> None:
    traffic = Traffic()
    beside = threading.Thread(target=traffic.wait, args=("gathers", Late()))
    beside.start()
    traffic.wait("reductions", Late())
    beside.join()
    tallies = traffic.take()
    assert tallies["reductions"].exposed >= 0.04 and "gathers" not in tallies


def test_messages_of_layers_are_counted_while_someone_watches() -> None:
    message = Message()
    message.arrive()
    with sending("tensor", 10):
        assert sent("tensor", 10, message) is message
    traffic = Traffic()
    watch(traffic)
    try:
        with sending("expert_dispatch", 10):
            pass
        sent("pipeline", 20, message, torch.empty(5)).wait()
    finally:
        watch(None)
    assert {k: (t.calls, t.bytes) for k, t in traffic.take().items()} == {"expert_dispatch": (1, 10), "pipeline": (1, 20)}


def test_the_table_gives_figures_of_one_step_and_the_picture_is_svg(tmp_path: Path) -> None:
    log = CommunicationLog()
    for _ in range(4):
        log.add(0.5, {"gradient_reduce": Tally(10, 2_000_000, 0.2, 0.1), "parameter_gather": Tally(5, 500_000, 0.1, 0.0)})
    assert log.share == pytest.approx(0.2)
    log.write(tmp_path)
    lines = (tmp_path / "communication.txt").read_text().splitlines()
    assert "20.0% of the time" in lines[0]
    assert lines[2].split() == ["gradient_reduce", "10", "2", "MB", "0.2", "0.1", "20.0%", "10", "MB/s"]
    drawn = xml.dom.minidom.parse(str(tmp_path / "communication.svg"))
    boxes = [b for b in drawn.getElementsByTagName("rect") if b.getAttribute("fill") == "#c8452f"]
    widths = [float(b.getAttribute("width")) for b in boxes]
    assert (
        widths[1] == pytest.approx(210, abs=0.2) and widths[2] == 0.0
    )  # half of the longest bar is exposed; the other has nothing
    heights = [float(b.getAttribute("height")) for b in boxes[3:]]
    assert heights == [pytest.approx(24, abs=0.1)] * 4  # a fifth of each step


PAIR = Group(("tensor",), (0, 1), 0)
CALLS = {  # method of `Transport` -> what it calls, and with which tensors
    "all_to_all": ("all_to_all_single", (torch.zeros(8), torch.zeros(8))),
    "all_gather": ("all_gather_into_tensor", (torch.zeros(8), torch.zeros(4))),
    "reduce_scatter": ("reduce_scatter_tensor", (torch.zeros(4), torch.zeros(8))),
    "all_reduce": ("all_reduce", (torch.zeros(8),)),
    "share": ("broadcast", ((torch.zeros(4), torch.zeros(4)),)),
    "swap": ("batch_isend_irecv", ((torch.zeros(4), torch.zeros(4)), (torch.zeros(4), torch.zeros(4)))),
}


def _traced(call: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What a call returns, and the functions of the log that it runs."""
    ran = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == traffic_module.__file__:
            ran.add(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        return call(), ran
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("method", list(CALLS))
def test_off_a_message_is_the_backends_call_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is the backend's own, and none of the log's code runs; on, the same call is counted: half of 32 bytes, or what a ring sends."""
    message = Message()
    message.arrive()
    name, tensors = CALLS[method]
    monkeypatch.setattr(dist, name, lambda *a, **k: [message] if method == "swap" else message)
    monkeypatch.setattr(dist, "P2POp", lambda *a: None)
    work, ran = _traced(lambda: getattr(Transport(), method)(*tensors, PAIR, "p"))
    assert ran == set()
    assert work is message or isinstance(work, All)
    counted = LoggedTransport()
    work, ran = _traced(lambda: getattr(counted, method)(*tensors, PAIR, "p"))
    work.wait()
    assert "begin" in ran
    tally = counted.take()["p"]
    assert (tally.calls, tally.bytes) == (1, 32 if method == "all_reduce" else 16)
    assert Transport().take() == {}
    counted.close()


def test_off_messages_of_layers_are_not_reckoned() -> None:
    message = Message()
    for call in (lambda: sent_among(PAIR, torch.zeros(8), message), lambda: sending_among(PAIR, torch.zeros(8))):
        ran = _traced(call)[1]
        assert len(ran) == 1  # which finds that nobody counts
    assert sent_among(PAIR, torch.zeros(8), message) is message and sending_among(PAIR, torch.zeros(8)) is sending("", 0)
