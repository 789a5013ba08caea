"""Processes of torchrun meet, and hear from the first one what to do."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.unit.strangers import Visit
from zorse_megatron.errors import LaunchError
from zorse_megatron.launch import elastic_ranks
from zorse_megatron.launch.elastic_ranks import (
    Answers,
    Arrival,
    Rendezvous,
    rendezvous,
    token_of,
)
from zorse_megatron.live.listener import LineSocket
from zorse_megatron.processes import free_port

TOKEN = token_of("zorse-7", "secret")


def met(size: int, decide: object, *, absent: int = 0, arrive_s: float = 20.0) -> list[object]:
    """What each process of a meeting got; exceptions too."""
    port, found = free_port(), [None] * size

    def come(number: int) -> None:
        point = Rendezvous(number=number, size=size, address="localhost", port=port, token=TOKEN)
        me = Arrival(node=f"n{number % 2}", local_rank=number // 2, free_port=number)
        try:
            found[number] = rendezvous(point, me, decide, arrive_s=arrive_s, decide_s=5.0)  # type: ignore
        except (LaunchError, ZeroDivisionError) as error:
            found[number] = error  # type: ignore[call-overload]

    numbers = [*range(1, size - absent), 0]  # the first one comes last
    threads = [threading.Thread(target=come, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(found)


def test_all_who_meet_hear_what_is_decided_for_them() -> None:
    seen: list[Arrival] = []

    def decide(arrivals: Sequence[Arrival]) -> Answers:
        seen.extend(arrivals)
        return [{"number": each.free_port} for each in arrivals]

    assert met(5, decide) == [{"number": number} for number in range(5)]
    assert [(each.node, each.local_rank) for each in seen] == [
        ("n0", 0),
        ("n1", 0),
        ("n0", 1),
        ("n1", 1),
        ("n0", 2),
    ]
    # Of the first one's node it is torchrun's own name, which others know it by.
    assert {(each.node, each.address) for each in seen} == {
        ("n0", "localhost"),
        ("n1", "127.0.0.1"),
    }


def test_a_process_that_does_not_come_ends_the_others() -> None:
    found = met(3, lambda arrivals: [{}] * 3, absent=1, arrive_s=0.5)
    assert "after 0.5 s process 2 is missing, and there are some of n0, n1" in str(found[0])
    assert "the first process has ended" in str(found[1])


def test_a_first_process_that_fails_ends_the_others() -> None:
    found = met(3, lambda arrivals: 1 / 0)
    assert isinstance(found[0], ZeroDivisionError)
    assert all("the first process has ended" in str(each) for each in found[1:])


def test_an_answer_that_is_cut_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = int(first.getsockname()[1])
        point = Rendezvous(number=1, size=2, address="127.0.0.1", port=port, token=TOKEN)

        def dies() -> None:
            connection, _ = first.accept()
            connection.makefile("rb").readline()
            connection.sendall(b'{"plan": "p')
            connection.close()

        thread = threading.Thread(target=dies)
        thread.start()
        with pytest.raises(LaunchError, match="the first process has ended"):
            rendezvous(
                point, Arrival(node="n", local_rank=0, free_port=1), list, arrive_s=9, decide_s=9
            )
        thread.join()
        # The first process itself, where another program has its port.
        with pytest.raises(LaunchError, match="a port that cannot be used"):
            rendezvous(
                replace(point, number=0),
                Arrival(node="n", local_rank=0, free_port=1),
                list,
                arrive_s=9,
                decide_s=9,
            )


def test_who_is_missing_is_told_while_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic_ranks, "NAMED_S", 0.3)
    found = met(5, lambda arrivals: [{}] * 5, absent=2, arrive_s=1.5)
    missing = "processes 3 to 4 are missing, and there are some of n0, n1"
    assert f"note: after 0.3 s {missing}; the others wait 1.5 s" in capsys.readouterr().out
    assert f"after 1.5 s {missing}" in str(found[0])
    point = Rendezvous(number=1, size=2, address="localhost", port=free_port(), token=TOKEN)
    me = Arrival(node="n", local_rank=0, free_port=1)
    with pytest.raises(LaunchError, match="refused"):
        rendezvous(point, me, list, arrive_s=0.6, decide_s=1)
    assert f"the first process is not at localhost:{point.port}" in capsys.readouterr().out


def test_nobody_waits_for_one_that_has_ended() -> None:
    """As with its agent: the others waited for three minutes, until all were to be there."""
    with hosted(3) as (point, found):
        hello = {"number": 1, "node": "lost", "local_rank": 0, "free_port": 1}
        dies = LineSocket.connect("127.0.0.1", point.port, TOKEN, timeout_s=5)
        dies.send(hello)
        dies.close()
    assert "process 1, on lost, has ended" in str(found[0])


_ANOTHER = b'{"number": 7, "node": "n", "local_rank": 0, "free_port": 1}\n'
_SAID = [b"GET / HTTP/1.1\n", b"[1]\n", b"{}\n", b"[" * 60_000 + b"\n", b"", _ANOTHER]


@pytest.mark.parametrize("said", _SAID)
@pytest.mark.parametrize("token", [b"", TOKEN.encode() + b"\n"])
def test_somebody_else_at_the_port_is_no_process_of_the_job(said: bytes, token: bytes) -> None:
    """Nor is one of another run, whose token is not this one's."""
    with hosted(2) as (point, found):
        other = socket.create_connection(("127.0.0.1", point.port))
        other.sendall(token + said)
        second = rendezvous(point, ME, list, arrive_s=20, decide_s=5)
    other.close()
    assert (second, found) == ({"number": 1}, [{"number": 0}])


@pytest.mark.usefixtures("many_files")
def test_strangers_do_not_keep_processes_from_meeting() -> None:
    """One that says nothing kept them for 10 s, and another one after it for 10 more."""
    with hosted(2) as (point, found):
        strangers = Visit(point.port)
        strangers.start()
        time.sleep(0.5)
        began_s = time.monotonic()
        second = rendezvous(point, ME, list, arrive_s=20, decide_s=5)
        assert time.monotonic() - began_s < 5
    while not strangers.is_over:
        time.sleep(0.1)
    assert (second, found) == ({"number": 1}, [{"number": 0}])
    assert not strangers.kept


def test_a_run_of_another_name_or_secret_is_another_one() -> None:
    runs = [("a", ""), ("a", "b"), ("ab", ""), ("a", "c"), ("", "ab")]
    tokens = {token_of(*run) for run in runs}
    assert len(tokens) == len(runs)
    with hosted(2, arrive_s=2) as (point, found), pytest.raises(LaunchError, match="another token"):
        rendezvous(replace(point, token=token_of("a", "")), ME, list, arrive_s=9, decide_s=5)
    assert "process 1 is missing" in str(found[0])


ME = Arrival(node="n", local_rank=0, free_port=1)


@contextmanager
def hosted(size: int, *, arrive_s: float = 20.0) -> Iterator[tuple[Rendezvous, list[object]]]:
    """A first process that listens, and where the second one meets it; then what it got."""
    found: list[object] = []
    point = Rendezvous(number=0, size=size, address="127.0.0.1", port=free_port(), token=TOKEN)

    def host() -> None:
        answers = [{"number": number} for number in range(size)]
        try:
            found.append(rendezvous(point, ME, lambda _: answers, arrive_s=arrive_s, decide_s=5))
        except LaunchError as error:
            found.append(error)

    thread = threading.Thread(target=host)
    thread.start()
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", point.port)).close()
            break
    yield replace(point, number=1), found
    thread.join()
