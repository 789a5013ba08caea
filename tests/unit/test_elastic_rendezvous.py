"""Processes of torchrun meet, and hear from the first one what to do."""

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from zorse_megatron.errors import LaunchError
from zorse_megatron.launch.elastic.torchrun_ranks import Answers, Arrival, Rendezvous, rendezvous
from zorse_megatron.processes import free_port


def met(size: int, decide: object, *, absent: int = 0, arrive_s: float = 20.0) -> list[object]:
    """What each process of a meeting got; exceptions too."""
    port, found = free_port(), [None] * size

    def come(number: int) -> None:
        point = Rendezvous(number=number, size=size, address="localhost", port=port)
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
    assert "1 processes not there after 0.5 s" in str(found[0])
    assert "the first process has ended" in str(found[1])


def test_a_first_process_that_fails_ends_the_others() -> None:
    found = met(3, lambda arrivals: 1 / 0)
    assert isinstance(found[0], ZeroDivisionError)
    assert all("the first process has ended" in str(each) for each in found[1:])


def test_an_answer_that_is_cut_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        point = Rendezvous(number=1, size=2, address="127.0.0.1", port=int(first.getsockname()[1]))

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


_ANOTHER = b'{"number": 7, "node": "n", "local_rank": 0, "free_port": 1}\n'


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\n", b"[1]\n", b"{}\n", b"", _ANOTHER])
def test_somebody_else_at_the_port_is_no_process_of_the_job(said: bytes) -> None:
    port = free_port()
    found: list[object] = []
    point = Rendezvous(number=0, size=2, address="127.0.0.1", port=port)
    me = Arrival(node="n", local_rank=0, free_port=1)

    def host() -> None:
        answers = [{"number": 0}, {"number": 1}]
        found.append(rendezvous(point, me, lambda arrivals: answers, arrive_s=20, decide_s=5))

    thread = threading.Thread(target=host)
    thread.start()
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as other:
                other.sendall(said)
            break
        except ConnectionRefusedError:
            continue
    second = rendezvous(replace(point, number=1), me, lambda arrivals: [], arrive_s=20, decide_s=5)
    thread.join()
    assert (second, found) == ({"number": 1}, [{"number": 0}])
