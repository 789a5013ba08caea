"""What comes to an open port of a job without being one of its processes."""

import random
import socket
import threading
import time
from collections.abc import Callable

Stranger = Callable[[socket.socket, random.Random], None]
"""Does what it does with a connection."""

MANY = 1_000


def deep_json(connection: socket.socket, _: random.Random) -> None:
    connection.sendall(b"[" * 100_000 + b"\n")


def endless_line(connection: socket.socket, _: random.Random) -> None:
    for _ in range(200):
        connection.sendall(b"x" * 1_000_000)


def random_bytes(connection: socket.socket, numbers: random.Random) -> None:
    for _ in range(50):
        connection.sendall(numbers.randbytes(numbers.randrange(1, 10_000)))


def slow_sender(connection: socket.socket, _: random.Random) -> None:
    for _ in range(1_000):
        connection.sendall(b"{")
        time.sleep(0.05)


def silent(connection: socket.socket, _: random.Random) -> None:
    connection.settimeout(20)
    assert not connection.recv(1), "it should be closed"


def wrong_token(connection: socket.socket, numbers: random.Random) -> None:
    connection.sendall(numbers.randbytes(16).hex().encode() + b'\n{"rank": 1, "host": "x"}\n')
    silent(connection, numbers)


def web_browser(connection: socket.socket, numbers: random.Random) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    silent(connection, numbers)


KINDS = (deep_json, endless_line, random_bytes, slow_sender, silent, wrong_token, web_browser)


class Visit:
    """All kinds of strangers at a port at a time, each a few times, and many that say nothing."""

    def __init__(self, port: int, *, each: int = 3, seed: int = 0) -> None:
        self._port = port
        self.kept: list[str] = []
        """Kinds of which a connection was not closed."""
        self._threads = [
            threading.Thread(target=self._come, args=(kind, seed + number))
            for kind in KINDS
            for number in range(each)
        ]
        self._threads.append(threading.Thread(target=self._come_in_numbers))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _come(self, kind: Stranger, seed: int) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=20) as connection:
            try:
                kind(connection, random.Random(seed))
                silent(connection, random.Random(seed))
            except (ConnectionError, BrokenPipeError):
                return  # closed, as it should be
            except (OSError, AssertionError):
                self.kept.append(kind.__name__)

    def _come_in_numbers(self) -> None:
        there = [socket.create_connection(("127.0.0.1", self._port), 20) for _ in range(MANY)]
        for connection in there:
            try:
                silent(connection, random.Random())
            except ConnectionError:
                pass
            except (OSError, AssertionError):
                self.kept.append("one of many")
            connection.close()
