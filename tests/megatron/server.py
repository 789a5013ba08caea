"""A process that has Megatron imported and forks the ranks of one job after another.

Importing torch and Megatron takes 5 to 8 s of CPU per process, a forked rank starts in milliseconds
and shares the pages of its parent. Speaks JSON lines: one job on stdin, one answer on stdout.
Started by `launch.MegatronServer`; ends when stdin closes. It must stay single-threaded, because a
fork copies locks that other threads hold and not the threads.
"""

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import pkgutil
import random
import resource
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

POLL_S = 0.01
# Between the request for tracebacks and the end.
GRACE_FOR_TRACEBACKS_S = 1.0
# Below those that Linux hands out (`ip_local_port_range`).
PORTS = range(12_000, 32_000)
# What a run imports of this project, most of it late: after the plan and Megatron's flags are read.
RUN_PACKAGES = ("schema", "schedules", "runtime", "adapter")
_PR_SET_PDEATHSIG = 1


def preload() -> None:
    """Import what every rank needs, and start no thread and no process group."""
    from zorse_megatron.adapter.cpu import cpu_mode

    if cpu_mode.needed():
        cpu_mode.enable()
    # Stock imports these in every run.
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text.models.default_tokenizer  # noqa: F401

    import zorse_megatron.pretrain  # noqa: F401
    from zorse_megatron.flags.flag_handling import refusable

    for name in RUN_PACKAGES:
        package = importlib.import_module(f"zorse_megatron.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    refusable()  # is remembered
    remember_arguments()
    fork_helpers_of_saves()


def fork_helpers_of_saves() -> None:
    """Let a rank that saves fork the process that holds its queue, instead of spawning it.

    A spawned one imports the training script, and so Megatron, again: 4 to 8 s of CPU per rank.
    Jobs that tests start with torchrun spawn it as stock does.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    stock = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = functools.partial(stock, mp_mode="fork")


def remember_arguments() -> None:
    """Let ranks take Megatron's arguments from a parser that is there, as argparse's `parents` do.

    Stock builds one of 800 arguments, whose help it reads from its sources, and so does each check
    of ours: three times and 1 s of CPU in every rank. No one changes a parser's arguments.
    """
    from megatron.training import arguments

    stock = arguments.add_megatron_arguments
    parent = stock(argparse.ArgumentParser(add_help=False, allow_abbrev=False))

    @functools.wraps(stock)
    def remembered(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser._add_container_actions(parent)  # type: ignore[attr-defined]
        return parser

    arguments.add_megatron_arguments = remembered


def free_port() -> int:
    """Return a TCP port that is free now, and that the system gives to nobody who asks for any.

    So no connection of a job that another worker of the tests runs takes it before this one does.
    """
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Turn this forked child into a rank and run the entry module as `__main__`."""
    os.setpgid(0, 0)  # so that its own children (data loaders, checkpoint writers) end with it
    end_with_parent()
    output = os.open(Path(job["output_dir"], f"rank_{rank}.txt"), os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=2)  # SIGABRT prints every thread's traceback
    os.environ.update(rank_environment(rank, job["world_size"], port))
    os.environ.update(job["env"])
    os.chdir(job["directory"])
    import torch

    torch.set_num_threads(1)
    sys.argv = [job["entry"], *job["argv"]]
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
    threading._shutdown()  # type: ignore[attr-defined]  (joins threads that are no daemons)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_group(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal_number)


class Ranks:
    """The running ranks of one job."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.returncodes: dict[int, int] = {}

    def poll(self) -> bool:
        """Reap what has ended; whether all have."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.returncodes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.returncodes[rank] = os.waitstatus_to_exitcode(status)
                    end_group(pid, signal.SIGKILL)  # what a dead rank leaves behind
        return len(self.returncodes) == len(self.pids)

    def wait(self, until_s: float, client_is_gone: Any, *, grace_s: float) -> bool:
        """Wait for all ranks; whether they ended by themselves before `until_s`.

        After the first failure the others have `grace_s` to end as well.
        """
        failed_at_s: float | None = None
        while not self.poll():
            now_s = time.monotonic()
            if failed_at_s is None and any(self.returncodes.values()):
                failed_at_s = now_s
            given_up = failed_at_s is not None and now_s > failed_at_s + grace_s
            if given_up or now_s > until_s or client_is_gone():
                return given_up
            time.sleep(POLL_S)
        return True

    def end(self) -> None:
        """End the ranks that are left, with their tracebacks in their output."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.returncodes:
                os.kill(pid, signal.SIGABRT)
        deadline_s = time.monotonic() + GRACE_FOR_TRACEBACKS_S
        while not self.poll() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        for pid in self.pids:
            end_group(pid, signal.SIGKILL)
        while not self.poll():
            time.sleep(POLL_S)


def client_is_gone() -> bool:
    """Whether stdin has closed: the client sends nothing while a job runs."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of one job and wait for them. Never returns in a child."""
    started_s = time.monotonic()
    port = free_port()
    pids = []
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            become_rank(job, rank, port)
        pids.append(pid)
    ranks = Ranks(pids)
    in_time = ranks.wait(
        started_s + job["timeout_s"], client_is_gone, grace_s=job["grace_after_failure_s"]
    )
    ranks.end()
    return {
        "returncodes": [ranks.returncodes[rank] for rank in range(job["world_size"])],
        "timed_out": not in_time,
        "wall_s": time.monotonic() - started_s,
    }


def main() -> None:
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
