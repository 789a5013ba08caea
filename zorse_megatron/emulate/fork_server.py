"""A process that has Megatron imported and forks the ranks of one job after another.

Importing torch and Megatron takes 5 to 8 s of CPU and hundreds of megabytes; a forked rank starts
in milliseconds and shares the pages of its parent. Speaks JSON lines, one job on stdin and one
answer on stdout (see `rank_jobs`), and ends when stdin closes. It must stay single-threaded,
because a fork copies locks that other threads hold and not the threads.
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import resource
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from zorse_megatron.processes import end_with_parent, free_port, prepare_forks, rank_variables

_POLL_S = 0.01
# Between the request for tracebacks and the end.
_GRACE_FOR_TRACEBACKS_S = 1.0


def preload() -> None:
    """Import what every rank needs, and start no thread and no process group."""
    from zorse_megatron.adapter import cpu_mode

    if cpu_mode.needed():
        cpu_mode.enable()
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.adapter.preload import (
        hooks_of_forked_ranks,
        import_late_modules_of_stock,
        remember_flags,
    )

    import_late_modules_of_stock()
    REGISTRY.apply(hooks_of_forked_ranks(on_gpu=not cpu_mode.enabled()))
    remember_flags()
    # What a rank imports late, once it has its plan and its flags.
    import zorse_megatron.adapter.gpt_entry
    import zorse_megatron.adapter.recording
    import zorse_megatron.adapter.training
    import zorse_megatron.emulate.conductor
    import zorse_megatron.emulate.on_ranks.memory_cap
    import zorse_megatron.emulate.on_ranks.model_sizes
    import zorse_megatron.emulate.on_ranks.pacer
    import zorse_megatron.pretrain  # noqa: F401


def serve(preload: Callable[[], None]) -> None:
    """Run jobs until stdin closes. `preload` imports what ranks need, and starts no thread."""
    # Stock prints while it is imported; the answers need a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    gc.disable()  # of what is imported nothing is garbage
    preload()
    prepare_forks()
    _refuse_broken_cuda()
    gc.enable()
    print(json.dumps({"ready": True}), file=answers)
    while line := sys.stdin.readline():
        print(json.dumps(_run(json.loads(line))), file=answers)


def _refuse_broken_cuda() -> None:
    """Exit where children could not use GPUs that are visible, as where import has started CUDA."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.ones(1, device="cuda")
            status = 0
        except Exception as error:
            why = str(error).partition("\n")[0]
            print(f"a forked process cannot use CUDA: {why}", file=sys.stderr, flush=True)
        os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(1)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of one job and wait for them. Never returns in a child."""
    started_s, port = time.monotonic(), free_port()
    pids = []
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(job, rank, port)
        pids.append(pid)
    ranks = _Ranks(pids)
    ranks.wait(started_s + job["limit_s"], grace_s=job["grace_after_failure_s"])
    had_to_be_ended = ranks.running
    ranks.end()
    return {
        "statuses": [
            None if rank in had_to_be_ended else ranks.statuses[rank] for rank in range(len(pids))
        ],
        "wall_s": time.monotonic() - started_s,
    }


def _become_rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Turn this forked child into a rank and run the entry module as `__main__`."""
    os.setpgid(0, 0)  # so that its own children (data loaders, checkpoint writers) end with it
    end_with_parent()
    path = Path(job["directory"], f"rank_{rank}.txt")
    output = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=2)  # SIGABRT prints every thread's traceback
    os.environ.update(rank_variables(rank, job["world_size"], port))
    os.environ.update(job["environment"])
    os.chdir(job["working_directory"] or job["directory"])
    import torch

    torch.set_num_threads(1)
    sys.argv = [job["entry"], *job["arguments"]]
    leave(run_as_main(job["entry"]))


def run_as_main(module: str) -> int:
    """Run `module` as `python -m module` would and return the exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit_request:
        if exit_request.code is None or isinstance(exit_request.code, int):
            return exit_request.code or 0
        print(exit_request.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def leave(status: int) -> NoReturn:
    """End this process as the interpreter does, but leave its memory to the kernel.

    Python tears every module down at exit; after a fork that copies the parent's pages and takes
    1.3 s, more than a small training run.
    """
    # Joins threads that are no daemons.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Ranks:
    """The ranks of one job."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.statuses: dict[int, int] = {}

    @property
    def running(self) -> list[int]:
        """Those that have not ended, or not been reaped."""
        return [rank for rank in range(len(self.pids)) if rank not in self.statuses]

    def poll(self) -> bool:
        """Reap what has ended; whether all have."""
        for rank in self.running:
            ended, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if ended:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
                _kill_group(self.pids[rank])  # what a dead rank leaves behind
        return not self.running

    def wait(self, until_s: float, *, grace_s: float) -> None:
        """Wait for all ranks, until `until_s` at most.

        After the first failure the others wait in vain: they have `grace_s` to end as well.
        """
        while not self.poll():
            now_s = time.monotonic()
            if any(self.statuses.values()):
                until_s = min(until_s, now_s + grace_s)
            if now_s > until_s or _client_is_gone():
                return
            time.sleep(_POLL_S)

    def end(self) -> None:
        """End the ranks that are left, with their tracebacks in their output."""
        for rank in self.running:
            os.kill(self.pids[rank], signal.SIGABRT)
        deadline_s = time.monotonic() + _GRACE_FOR_TRACEBACKS_S
        while not self.poll() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        for pid in self.pids:
            _kill_group(pid)
        while not self.poll():
            time.sleep(_POLL_S)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _client_is_gone() -> bool:
    """Whether stdin has closed: the client sends nothing while a job runs."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    serve(preload)
