"""Runs modules as `python -m` does, forked by a process that has imported what they import.

A start of Python takes a quarter of a second of CPU, and two seconds where torch is imported.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import process as started_processes
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import NoReturn

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.launcher.api",
        "zorse_megatron.emulate.fork_server",
        "zorse_megatron.live.start_watch",
    ]
)
_STARTING = threading.Lock()


def make_ready() -> None:
    """Have all of it imported, which the first start would wait for."""
    process = _CONTEXT.Process(target=os.getpid)
    process.start()
    process.join()


def start(
    module: str, words: Sequence[str], environment: Mapping[str, str], output: Path
) -> ForkServerProcess:
    """Start one, as the leader of a session of its own; `output` is appended to, or a pipe."""
    process = _CONTEXT.Process(
        target=_become, args=(module, tuple(words), dict(environment), str(output))
    )
    with _STARTING:
        process.start()
        # Each start asks all others whether they have ended. One that is joined by its thread at
        # that moment loses its status, which can be read once, and has 255 instead.
        started_processes._children.discard(process)  # type: ignore[attr-defined]
    return process


def _become(
    module: str, words: Sequence[str], environment: Mapping[str, str], output: str
) -> NoReturn:
    from zorse_megatron.emulate.fork_server import leave, run_as_main

    os.setsid()
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *words]
    sys.excepthook = _as_python_ends
    leave(run_as_main(module))


def _as_python_ends(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, trace)
    if kind is KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
