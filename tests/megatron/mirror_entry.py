"""`recording_entry` on pretended nodes, one of which may die.

`ZORSE_TEST_NODES`: the node of each rank; `ZORSE_TEST_SHM`: a directory with one for each node, in
place of its shared memory; `ZORSE_TEST_DEATH=<node>:<when>`: all ranks of the node are killed in
the middle of that step; `ZORSE_TEST_FULL=<node>:<iteration>`: there is no room for the second half
of what the node is to keep of that iteration for others.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.megatron.recording_entry import record
from zorse_megatron.adapter.cpu import cpu_mode
from zorse_megatron.launch.rank_environment import NODE_NAME
from zorse_megatron.migration.mirror import files

NODE = os.environ["ZORSE_TEST_NODES"].split()[int(os.environ["RANK"])]
LOST, _, WHEN = os.environ.get("ZORSE_TEST_DEATH", "").partition(":")


FULL, _, FULL_AT = os.environ.get("ZORSE_TEST_FULL", "").partition(":")


def filling(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_copy(self: Any, copy: Any, pieces: Any) -> Any:
        def until_full() -> Iterator[Any]:
            yield next(iter(pieces))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        is_full = copy.iteration == int(FULL_AT) and copy.rank != int(os.environ["RANK"])
        return write(self, copy, until_full() if is_full else pieces)

    return write_copy


def telling(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_copy(self: Any, copy: Any, pieces: Any) -> Any:
        print(f"a copy is written by {threading.current_thread().name}")
        return write(self, copy, pieces)

    return write_copy


def dying(computation: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, action: Any, runner: Any) -> Any:
        if self.step + 1 == int(WHEN):
            os.kill(os.getpid(), signal.SIGKILL)
        return computation(self, action, runner)

    return run


if __name__ == "__main__":
    os.environ[NODE_NAME] = NODE
    files.SHARED_MEMORY = Path(os.environ["ZORSE_TEST_SHM"], NODE)
    files.SHARED_MEMORY.mkdir(parents=True, exist_ok=True)
    if cpu_mode.needed():
        cpu_mode.enable()
    from zorse_megatron.adapter.moving import mirror

    mirror._PIECE_BYTES = 4096
    files.MirrorFolder.write = telling(files.MirrorFolder.write)  # type: ignore[method-assign]
    if NODE == FULL:
        files.MirrorFolder.write = filling(files.MirrorFolder.write)  # type: ignore[method-assign]
    if NODE == LOST:
        from zorse_megatron.runtime.executor import Executor

        Executor._backward = dying(Executor._backward)  # type: ignore[method-assign]
    record()
