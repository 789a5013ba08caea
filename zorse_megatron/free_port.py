"""A TCP port for the ranks of a job to meet at."""

import contextlib
import random
import socket

# Below those that Linux hands out by itself (`ip_local_port_range`).
_PORTS = range(12_000, 29_000)


def free_port() -> int:
    """Return a port that is free now, and that the system gives to nobody who asks for any.

    So no connection of another process takes it before the caller does.
    """
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
