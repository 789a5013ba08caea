"""Connects the ranks of a job to their conductor, in a thread of the process that runs the job."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from zorse_megatron.emulate.clock.conductor import Conductor
from zorse_megatron.emulate.clock.link_model import LinkModel
from zorse_megatron.emulate.clock.messages import Finish, Request

_CLOSE = -1
"""In place of a rank: the owner of the thread wants it to end."""


def call(address: str, rank: int) -> Connection:
    """Connect a rank to its conductor."""
    connection = Client(address, family="AF_UNIX")
    connection.send(rank)
    return connection


@contextlib.contextmanager
def conducted(model: LinkModel) -> Iterator[str]:
    """Conduct one job within the block, which gets the address for `call`."""
    with tempfile.TemporaryDirectory(prefix="zorse-emulate-") as directory:
        address = str(Path(directory, "conductor"))
        with Listener(address, family="AF_UNIX", backlog=len(model.gpus) + 1) as listener:
            thread = threading.Thread(
                target=_serve, args=(listener, Conductor(model)), name="conductor", daemon=True
            )
            thread.start()
            try:
                yield address
            finally:
                with contextlib.suppress(OSError):
                    call(address, _CLOSE).close()
                thread.join()


def _serve(listener: Listener, conductor: Conductor) -> None:
    """Let all ranks call, then take their requests until they have ended."""
    connections: dict[Any, int] = {}
    while len(connections) < len(conductor.ranks):
        connection = listener.accept()
        rank = connection.recv()
        if rank == _CLOSE:
            return
        connections[connection] = rank
    by_rank = {rank: connection for connection, rank in connections.items()}
    while connections:
        for ready in wait(list(connections)):
            _listen(ready, connections, conductor)
        for rank, answer in conductor.answers():
            with contextlib.suppress(OSError):  # it has ended since; `gone` follows
                by_rank[rank].send(answer)


def _listen(connection: Any, connections: dict[Any, int], conductor: Conductor) -> None:
    """Take all that one rank has said."""
    rank = connections[connection]
    try:
        while connection.poll():
            request: Request = connection.recv()
            conductor.take(rank, request)
            if isinstance(request, Finish):
                del connections[connection]
                return
    except (EOFError, OSError):
        del connections[connection]
        conductor.gone(rank)
