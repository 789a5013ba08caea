"""A process that has Megatron imported and forks the ranks of one emulated job after another.

Importing Megatron takes seconds and hundreds of megabytes; a forked rank starts in milliseconds and
shares the pages of its parent. Speaks JSON lines: one job on stdin, one answer on stdout; ends when
stdin closes. It stays single-threaded, because a fork copies locks that other threads hold and not
the threads. Started by `rank_server.RankServer`.
"""

import atexit
import contextlib
import ctypes
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from zorse_megatron.cheap_forks import prepare_forks

_POLL_S = 0.01
_PORTS = range(12_000, 32_000)
# The others of a job wait in vain for a rank that has failed: they get this long to say so.
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def preload() -> None:
    """Import what every rank needs, and start no thread and no process group."""
    from zorse_megatron.adapter.cpu import cpu_mode

    cpu_mode.enable()
    from zorse_megatron.adapter.patches.registry import REGISTRY
    from zorse_megatron.adapter.preload import hooks_of_forked_ranks, import_late_modules_of_stock

    import_late_modules_of_stock()
    REGISTRY.apply(hooks_of_forked_ranks())
    # What a rank imports late, once it has its plan and its flags.
    import zorse_megatron.adapter.emulation_hooks
    import zorse_megatron.adapter.gpt_entry
    import zorse_megatron.adapter.recording.metrics
    import zorse_megatron.adapter.training
    import zorse_megatron.emulate.clock.switchboard
    import zorse_megatron.emulate.on_ranks.emulated_host_link
    import zorse_megatron.emulate.on_ranks.memory_cap
    import zorse_megatron.emulate.on_ranks.model_sizes
    import zorse_megatron.pretrain  # noqa: F401


def _free_port() -> int:
    """A port below those that systems hand out to whoever asks for any: it stays free."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _become_rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    os.setpgid(0, 0)  # so that its own children end with it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(Path(job["directory"], f"rank_{rank}.txt"), os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    size = str(job["world_size"])
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **job["env"],
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    sys.argv = [job["entry"], *job["argv"]]
    _leave(_run_as_main(job["entry"]))


def _run_as_main(entry: str) -> int:
    try:
        runpy.run_module(entry, run_name="__main__", alter_sys=True)
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _leave(status: int) -> NoReturn:
    """End as the interpreter does, but leave the memory to the kernel.

    Python tears every module down at exit, which after a fork copies the parent's pages.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(pids: list[int], until_s: float) -> dict[int, int]:
    """Exit status of the ranks that end by themselves; after the first failure soon."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids) and time.monotonic() < until_s:
        for rank, pid in enumerate(pids):
            if rank not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                    if statuses[rank]:
                        until_s = min(until_s, time.monotonic() + _GRACE_S)
        if select.select([sys.stdin], [], [], 0)[0]:
            break  # whoever asked is gone
        time.sleep(_POLL_S)
    return statuses


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of one job and wait for them. Never returns in a child."""
    started_s, port = time.monotonic(), _free_port()
    pids = []
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(job, rank, port)
        pids.append(pid)
    statuses = _wait(pids, started_s + job["timeout_s"])
    for rank, pid in enumerate(pids):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if rank not in statuses:
            os.waitpid(pid, 0)
    return {
        "statuses": [statuses.get(rank) for rank in range(len(pids))],
        "wall_s": time.monotonic() - started_s,
    }


def main() -> None:
    """Serve until stdin closes."""
    # Stock prints while it is imported; the answers need a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    preload()
    prepare_forks()
    print(json.dumps({"ready": True}), file=answers)
    while line := sys.stdin.readline():
        print(json.dumps(run_job(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
