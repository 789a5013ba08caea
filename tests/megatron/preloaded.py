"""`tests.ranks.harness.run_ranks` with Megatron imported once, in a process of its own.

Importing Megatron takes seconds and CPU mode is for good, so neither happens in the test process:
a child does both once, and forks the ranks of every later call.
"""

import atexit
import functools
import pickle
from collections.abc import Callable
from multiprocessing import connection, get_context
from typing import Any

from tests.ranks.harness import RanksFailed, run_ranks
from zorse_megatron.adapter import cpu_mode

_FORK = get_context("fork")
# What the server needs beyond a job's own timeout: to import Megatron, and to stop the ranks.
MARGIN_S = 120.0


def run_megatron_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Any]:
    """As `run_ranks`; `fn`, `args` and the results must pickle without Megatron's classes."""
    pipe = _server()
    pipe.send_bytes(pickle.dumps((world_size, fn, args, timeout_s)))
    if not pipe.poll(timeout_s + MARGIN_S):
        raise RanksFailed("the server with Megatron does not answer")
    succeeded, answer = pickle.loads(pipe.recv_bytes())
    if not succeeded:
        raise RanksFailed(answer)
    return answer


@functools.cache
def _server() -> connection.Connection:
    here, there = _FORK.Pipe()
    process = _FORK.Process(target=_serve, args=(here, there), daemon=False)
    process.start()
    there.close()

    def stop() -> None:
        here.close()
        process.join()

    atexit.register(stop)
    return here


def _serve(theirs: connection.Connection, pipe: connection.Connection) -> None:
    theirs.close()  # else the pipe would not end with the test process
    cpu_mode.enable()
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    while True:
        try:
            world_size, fn, args, timeout_s = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, run_ranks(world_size, fn, *args, timeout_s=timeout_s))
        except RanksFailed as failure:
            answer = (False, str(failure))
        pipe.send_bytes(pickle.dumps(answer))
