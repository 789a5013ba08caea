"""Run one function on several real gloo ranks, and report every rank's traceback.

The ranks are forked from the test process, so torch (and whatever else the test has imported) is
loaded once. They meet through a file, so that no port can be taken. A rank that hangs is asked for
its Python stack before it is stopped.
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_FORK = get_context("fork")
END_TIMEOUT_S = 20.0


class RanksFailed(AssertionError):
    """At least one rank raised, died or missed the deadline; the message has all tracebacks."""


@dataclass(kw_only=True)
class _Rank:
    number: int
    process: Any
    pipe: connection.Connection
    stack_file: Path
    answer: tuple[bool, Any] | None = field(default=None)

    def collect(self) -> None:
        """Take the rank's answer if there is one; a closed pipe means that it died."""
        if self.answer is not None or not self.pipe.poll(0.02):
            return
        try:
            self.answer = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join()
            self.answer = (False, f"died with exit code {self.process.exitcode}, no traceback")

    def end(self) -> None:
        """Let a rank that has answered end by itself, so that it ends its own children too."""
        if self.answer is not None:
            self.process.join(END_TIMEOUT_S)
        self.process.kill()
        self.process.join()

    def report(self) -> str | None:
        """What went wrong, if anything: a traceback, or the stack of a rank that hangs."""
        if self.answer is not None:
            return None if self.answer[0] else f"rank {self.number}: {self.answer[1]}"
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        stack = self.stack_file.read_text()
        return f"rank {self.number} did not answer in time; it was in:\n{stack}"


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Any]:
    """Call `fn(*args)` on `world_size` forked ranks with gloo set up; return results by rank.

    `fn` reads its rank from `torch.distributed`. Results must pickle. Raises RanksFailed with the
    traceback of every rank that raised, and the stack of every rank that was still running
    `timeout_s` seconds after the start or 2 s after another rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="zorse-ranks-") as directory:
        ranks = [
            _start(number, world_size, Path(directory), fn, args) for number in range(world_size)
        ]
        try:
            _collect_all(ranks, time.monotonic() + timeout_s)
            reports = [report for rank in ranks if (report := rank.report()) is not None]
        finally:
            for rank in ranks:
                rank.end()
    if reports:
        raise RanksFailed("\n".join([f"{len(reports)} of {world_size} ranks failed", *reports]))
    return [rank.answer[1] for rank in ranks if rank.answer is not None]


def _collect_all(ranks: list[_Rank], deadline: float) -> None:
    """Wait for all answers; not for long once a rank has failed, as the others wait for it."""
    while any(rank.answer is None for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            rank.collect()
        if any(rank.answer is not None and not rank.answer[0] for rank in ranks):
            deadline = min(deadline, time.monotonic() + 2)


def _start(
    number: int, world_size: int, directory: Path, fn: Callable[..., Any], args: tuple[Any, ...]
) -> _Rank:
    here, there = _FORK.Pipe(duplex=False)
    stack_file = directory / f"stack_{number}.txt"
    stack_file.touch()
    process = _FORK.Process(
        target=_rank_main,
        kwargs={
            "number": number,
            "world_size": world_size,
            "stack_file": stack_file,
            "pipe": there,
            "call": lambda: fn(*args),
        },
    )
    process.start()
    there.close()
    return _Rank(number=number, process=process, pipe=here, stack_file=stack_file)


def _rank_main(
    *,
    number: int,
    world_size: int,
    stack_file: Path,
    pipe: connection.Connection,
    call: Callable[[], Any],
) -> None:
    with stack_file.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        # More threads would fight over the cores with the other ranks, and a thread pool of the
        # parent does not survive the fork.
        torch.set_num_threads(1)
        os.environ.update(RANK=str(number), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(stack_file.with_name("store")), world_size),
                rank=number,
                world_size=world_size,
                timeout=timedelta(seconds=600),  # the harness's own deadline is shorter
            )
            # Plain pickle: multiprocessing's would share tensors' memory with a rank that ends.
            answer = pickle.dumps((True, call()))
            dist.barrier()  # nobody leaves while another rank still needs its connection
            dist.destroy_process_group()
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
        pipe.close()
