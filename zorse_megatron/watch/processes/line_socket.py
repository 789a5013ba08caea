"""Lines of JSON over a socket that never blocks."""

import contextlib
import json
import socket
from typing import Any


class LineSocket:
    """One end of a connection between two watchers."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.is_open = True
        self._to_send = b""
        self._received = b""

    def fileno(self) -> int:
        """File descriptor, for `select`."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, now or at a later `flush`."""
        self._to_send += json.dumps(message).encode() + b"\n"
        self.flush()

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
        """Return the messages that have come; `is_open` is false when there will be no more."""
        while self.is_open:
            try:
                data = self.connection.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [message for line in lines if (message := _parsed(line)) is not None]

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.connection.close()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A message; None for what no watcher has sent."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
