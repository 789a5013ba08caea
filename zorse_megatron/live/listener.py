"""Lines of JSON between processes that know one token, over sockets that never block.

Anybody on the network may come to a port. What is read at a time, kept and put up with is bounded:
the first line is the token, of a fixed length and due within a second; else the connection ends.
"""

import contextlib
import errno
import hmac
import ipaddress
import json
import socket
from dataclasses import dataclass
from typing import Any

TOKEN_CHARACTERS = 32
_TURN_BYTES = 1 << 16
"""Read of one connection before others have their turn."""
_LINE_BYTES = 1 << 16
"""Reasons and phases have 2,000 bytes at most, which JSON may write as six times as many."""
_UNSENT_BYTES = 1 << 18
_TOKEN_S = 1.0
_MOST_STRANGERS = 512
"""At a time; others wait in the system's queue, for no longer than these have."""


class LineSocket:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.is_open = True
        self._to_send = b""
        self._received = b""

    @classmethod
    def connect(cls, address: str, port: int, token: str, *, timeout_s: float) -> "LineSocket":
        """Connect to a `Listener`, and say the token. Raises OSError."""
        line = cls(socket.create_connection((address, port), timeout=timeout_s))
        line._to_send = _first_line(token)
        line.flush()
        return line

    def fileno(self) -> int:
        """File descriptor, for `select`."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, now or at a later `flush`; closes a connection that takes none."""
        if self.is_open:
            self._to_send += json.dumps(message).encode() + b"\n"
            self.flush()
        if len(self._to_send) > _UNSENT_BYTES:
            self.close()

    def flush(self) -> None:
        """Send what is queued."""
        while self._to_send and self.is_open:
            try:
                sent = self.connection.send(self._to_send)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._to_send = self._to_send[sent:]

    def receive(self) -> list[dict[str, Any]]:
        """Return messages that have come; `is_open` is false when there will be no more."""
        num_read = 0
        while self.is_open and num_read < _TURN_BYTES:
            try:
                data = self.connection.recv(_TURN_BYTES - num_read)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
            num_read += len(data)
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        if max(map(len, [*lines, self._received])) > _LINE_BYTES:
            self.close()
        return [message for line in lines if (message := _parsed(line)) is not None]

    def close(self) -> None:
        """Close the connection; what is queued is lost."""
        self.is_open, self._to_send = False, b""
        self.connection.close()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A message; None for what no process of the job has sent."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _first_line(token: str) -> bytes:
    return token.encode() + b"\n"


# Lets in those who know the token.


@dataclass(kw_only=True)
class _Stranger:
    """A connection that has not said the token so far."""

    connection: socket.socket
    address: str
    since_s: float
    said: bytes = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def hear(self, num_bytes: int) -> None:
        """Read what is there of the first line. Raises OSError where there will be no more."""
        try:
            data = self.connection.recv(num_bytes - len(self.said))
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        self.said += data


class Listener:
    """A port at which connections are let in that begin with the token."""

    def __init__(self, address: str, port: int, token: str, *, is_one_node: bool) -> None:
        """Listen at the address that the job uses, so that other networks do not reach the port.

        `address`: of this node, as others call it; `port`: 0 for a free one; `is_one_node`: nobody
        comes from another node. `note` says why it listens at all addresses, if it does. Raises
        OSError where the port is taken.
        """
        self._socket, self.note = _bound(address, port, is_one_node=is_one_node)
        self._socket.setblocking(False)
        self._first_line = _first_line(token)
        self._strangers: list[_Stranger] = []

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    @property
    def sockets(self) -> list[Any]:
        """What to wait for."""
        has_room = len(self._strangers) < _MOST_STRANGERS
        return [*([self._socket] if has_room else []), *self._strangers]

    def fileno(self) -> int:
        """File descriptor of the port itself."""
        return self._socket.fileno()

    def admitted(self, now_s: float) -> list[tuple[LineSocket, str]]:
        """Return who has said the token since the last call, with their addresses."""
        self._accept(now_s)
        found, waiting = [], []
        for stranger in self._strangers:
            with contextlib.suppress(OSError):
                stranger.hear(len(self._first_line))
                if hmac.compare_digest(stranger.said, self._first_line):
                    found.append((LineSocket(stranger.connection), stranger.address))
                    continue
                is_wrong = len(stranger.said) == len(self._first_line)
                if not is_wrong and now_s - stranger.since_s <= _TOKEN_S:
                    waiting.append(stranger)
                    continue
            stranger.connection.close()
        self._strangers = waiting
        return found

    def close(self) -> None:
        """Close the port and what has come to it without the token."""
        for stranger in self._strangers:
            stranger.connection.close()
        self._socket.close()

    def _accept(self, now_s: float) -> None:
        while len(self._strangers) < _MOST_STRANGERS:
            try:
                connection, (host, *_) = self._socket.accept()
            except OSError:
                return
            connection.setblocking(False)
            self._strangers.append(
                _Stranger(connection=connection, address=_usual(str(host)), since_s=now_s)
            )


def _usual(host: str) -> str:
    """An address as others may listen at it: IPv4 as such, where it came by a socket of both."""
    mapped = getattr(ipaddress.ip_address(host.partition("%")[0]), "ipv4_mapped", None)
    return host if mapped is None else str(mapped)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _bound(address: str, port: int, *, is_one_node: bool) -> tuple[socket.socket, str]:
    """A socket that listens at `address` or, where that cannot be, at all; then with the reason."""
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        places = []
    found = {str(place[0]) for *_, place in places}
    # /etc/hosts may lead to a loopback address for a host's own name, and a resolver to all that
    # the host has; which of them others know is not known.
    may_be_far = not is_one_node and address != "localhost"
    is_known = (
        not may_be_far or found == {address} or (len(found) == 1 and not _is_loopback(*found))
    )
    for family, _, _, _, place in places if is_known else ():
        try:
            return socket.create_server(place, family=family, backlog=socket.SOMAXCONN), ""
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
    known = f"leads to {', '.join(sorted(found))}" if found else "is unknown"
    note = f"{address} {known} on its own node: port {{port}} is open at all of its addresses"
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    more: dict[str, Any] = both if socket.has_dualstack_ipv6() else {}
    listener = socket.create_server(("", port), backlog=socket.SOMAXCONN, **more)
    return listener, note.format(port=listener.getsockname()[1])
