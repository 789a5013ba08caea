"""Anybody may reach a port of a job: nobody without its token ends, slows or fills it."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from multiprocessing.connection import wait

import pytest

from tests.unit.strangers import Visit
from zorse_megatron.live import listener as listener_module
from zorse_megatron.live.hub import BEAT_S, Hub, Member
from zorse_megatron.live.listener import LineSocket, Listener
from zorse_megatron.live.root_cause import Timeouts

TOKEN = "5" * 32
MOST_KEPT_BYTES = 8 << 20


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1", 0, TOKEN, is_one_node=True)
    yield found
    found.close()


@pytest.mark.usefixtures("many_files")
def test_strangers_at_the_hubs_port_change_nothing(listener: Listener) -> None:
    """100,000 "[" ended it, bytes without an end kept it from its beats and its memory."""
    told: list[str] = []
    hub = Hub(2, listener, timeouts=Timeouts(), describe=str, host="node 0", tell=told.append)
    member = Member(1, timeouts=Timeouts(), describe=str, host="node 1", speaks=True)
    address = f"127.0.0.1 {listener.port} {TOKEN}"
    strangers = Visit(listener.port)
    beats_s, began_s = [], time.monotonic()
    tracemalloc.start()
    strangers.start()
    while not strangers.is_over or time.monotonic() - began_s < 3 * BEAT_S:
        wait([*hub.sockets, *member.sockets], 0.1)
        now_s = time.monotonic()
        assert now_s - began_s < 40
        hub.work(address, now_s)
        heard_s = member._heard_s
        member.work(address, now_s)
        if member._heard_s != heard_s:
            beats_s.append(now_s)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not strangers.kept
    gaps_s = [after - before for before, after in zip([began_s, *beats_s], beats_s, strict=False)]
    assert max(gaps_s) < 3 * BEAT_S and len(beats_s) >= 3
    assert (hub.culprit, hub.hosts, told) == (None, {0: "node 0", 1: "node 1"}, [])
    assert member.stop is None and len(hub.sockets) == 2
    assert most_bytes < MOST_KEPT_BYTES
    for line in member.sockets:
        line.close()


@pytest.mark.parametrize("said", [b"[" * 60_000 + b"\n", b"\xff\n", b"3\n", b"x" * 100_000])
def test_what_knows_the_token_is_bounded_too(said: bytes, listener: Listener) -> None:
    """A message is passed over that is none; a line without an end ends its connection."""
    other = LineSocket.connect("127.0.0.1", listener.port, TOKEN, timeout_s=5)
    ((line, address),) = admitted(listener, 1)
    other.connection.setblocking(True)
    other.connection.sendall(said)
    other.send({"beat": 1})
    found: list[object] = []
    until_s = time.monotonic() + 5
    while not found and line.is_open and time.monotonic() < until_s:
        found += line.receive()
    assert address == "127.0.0.1"
    assert (found, line.is_open) == (([{"beat": 1}], True) if b"\n" in said else ([], False))
    for each in (other, line):
        each.close()


def test_one_that_sends_without_end_leaves_others_their_turn(listener: Listener) -> None:
    other = LineSocket.connect("127.0.0.1", listener.port, TOKEN, timeout_s=5)
    ((line, _),) = admitted(listener, 1)
    message, count = b'{"beat": 1}\n', 100_000
    other.connection.setblocking(True)
    sending = threading.Thread(target=other.connection.sendall, args=(message * count,))
    sending.start()
    time.sleep(0.2)  # until the system's buffers are full
    found = []
    while sum(found) < count:
        found.append(len(line.receive()))
        assert line.is_open
    assert 1 < max(found) <= 2**16 / len(message) + 1
    sending.join()
    for each in (other, line):
        each.close()


def test_messages_do_not_pile_up_for_one_who_does_not_read(listener: Listener) -> None:
    other = LineSocket.connect("127.0.0.1", listener.port, TOKEN, timeout_s=5)
    ((line, _),) = admitted(listener, 1)
    for _ in range(100):
        line.send({"reason": "x" * 200_000})
    assert not line.is_open
    other.close()


def test_who_is_late_with_the_token_is_closed_and_may_come_again(listener: Listener) -> None:
    """As one that the system lets wait between its connection and its first line."""
    wrong = socket.create_connection(("127.0.0.1", listener.port))
    wrong.sendall(TOKEN[::-1].encode().replace(b"5", b"6") + b"\n")
    until_s = time.monotonic() + 5
    while not listener._strangers:
        listener._accept(0.0)
        assert time.monotonic() < until_s
    assert listener.admitted(0.0) == [] and not listener._strangers, "at once"
    wrong.close()
    late = socket.create_connection(("127.0.0.1", listener.port))
    late.sendall(TOKEN[:9].encode())
    assert [listener.admitted(at_s) for at_s in (0.0, 0.9, 1.1)] == [[], [], []]
    assert late.recv(1) == b""
    late.close()
    member = Member(1, timeouts=Timeouts(), describe=str, host="here", speaks=True)
    address = f"127.0.0.1 {listener.port} {TOKEN}"
    member.work(address, 1.0)
    listener._accept(0.0)
    (stranger,) = listener._strangers
    stranger.connection.close()  # as after its second
    listener._strangers.clear()
    for at_s in (1.6, 2.2, 2.8):
        member.work(address, at_s)
    ((line, _),) = admitted(listener, 1)
    assert line.receive()[0] == {"rank": 1, "host": "here"} and member.stop is None
    for each in (line, *member.sockets):
        each.close()


def admitted(listener: Listener, num: int) -> list[tuple[LineSocket, str]]:
    found: list[tuple[LineSocket, str]] = []
    until_s = time.monotonic() + 10
    while len(found) < num:
        assert time.monotonic() < until_s
        found += listener.admitted(time.monotonic())
    return found


@pytest.mark.parametrize(
    ("address", "is_one_node", "bound"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("localhost", False, "127.0.0.1"),
        ("this-host", True, "127.0.1.1"),
        ("this-host", False, None),
        ("this-host of two networks", True, "127.0.2.1"),
        ("this-host of two networks", False, None),
        ("elsewhere", True, None),
        ("unknown", True, None),
    ],
)
def test_a_port_is_open_at_the_address_of_the_job(
    address: str, is_one_node: bool, bound: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name that cannot be the right one here it is open at all, which is told."""
    names = {
        **{"this-host": ["127.0.1.1"], "this-host of two networks": ["127.0.2.1", "203.0.113.8"]},
        **{"elsewhere": ["203.0.113.7"], "localhost": ["127.0.0.1"]},
    }

    def known(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host == "unknown":
            raise socket.gaierror
        places = [(each, port) for each in names.get(host, [host])]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", known)
        # 127.0.2.1 stands for an address that other nodes may know.
        patched.setattr(listener_module, "_is_loopback", {"127.0.0.1", "127.0.1.1"}.__contains__)
        found = Listener(address, 0, TOKEN, is_one_node=is_one_node)
    host = found._socket.getsockname()[0]
    assert host == bound or (bound is None and host in ("::", "0.0.0.0"))
    assert bool(found.note) == (bound is None)
    assert bound is not None or (address in found.note and str(found.port) in found.note)
    # As others may listen at it, not "::ffff:127.0.0.1".
    line = LineSocket.connect(bound or "127.0.0.1", found.port, TOKEN, timeout_s=5)
    assert admitted(found, 1)[0][1].startswith("127.0.")
    line.close()
    found.close()


def test_a_port_that_is_taken_is_no_reason_for_another_address(listener: Listener) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", listener.port, TOKEN, is_one_node=True)
