"""Runs the ranks of a job on this machine, and leaves none behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from zorse_megatron.emulate.forks.fork_client import ForkClient, ForkedJob, output_of, tail_of
from zorse_megatron.ends_with_parent import end_with_parent
from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.free_port import free_port

_SERVER = "zorse_megatron.emulate.on_ranks.server_main"
_POLL_S = 0.05
# After one rank has failed, the watched others end by themselves within seconds.
_GRACE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """`python -m entry ARGUMENTS` as so many ranks on this machine."""

    name: str
    arguments: tuple[str, ...]
    world_size: int
    directory: Path
    """Exists; the ranks run there, and what they print is left there."""
    limit_s: float
    entry: str = "zorse_megatron.pretrain"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of all ranks, beside what torchrun would set."""


RunJob = Callable[[RankJob], None]
"""Runs a job to its end. Raises RankFailure unless all ranks end with status 0 in time."""


@contextlib.contextmanager
def runner_here(*, has_gpu: bool) -> Iterator[RunJob]:
    """What runs jobs on this machine; what it has started ends with the block.

    No fork survives CUDA, so ranks with GPUs import everything themselves. The others are forked
    from a process that has Megatron imported.
    """
    if has_gpu:
        yield run_spawned
        return
    with contextlib.closing(ForkClient(_SERVER)) as client:
        yield partial(run_forked, client)


def run_spawned(job: RankJob) -> None:
    """Run each rank as a process of its own. Raises RankFailure."""
    started_s = time.monotonic()
    _refuse_failed(job, spawned_statuses(job), time.monotonic() - started_s)


def run_forked(client: ForkClient, job: RankJob) -> None:
    """Run the ranks as forks of the client's server. Raises RankFailure."""
    end = client.run(
        ForkedJob(
            entry=job.entry,
            argv=job.arguments,
            world_size=job.world_size,
            timeout_s=job.limit_s,
            output_directory=str(job.directory),
            working_directory=str(job.directory),
            env=job.environment,
        )
    )
    ended = end.had_to_be_ended
    statuses = [None if rank in ended else status for rank, status in enumerate(end.statuses)]
    _refuse_failed(job, statuses, end.wall_s)


def spawned_statuses(job: RankJob) -> list[int | None]:
    """Run each rank as a process; exit statuses, None of those that had to be ended."""
    until_s, port = time.monotonic() + job.limit_s, free_port()
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_spawned(job, n, port)) for n in range(job.world_size)]
        return _wait(ranks, until_s)


@contextlib.contextmanager
def _spawned(job: RankJob, rank: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A rank in a session of its own, of which nothing is left at the end of the block.

    Nor after this process, if that is killed and does not come to the end of the block.
    """
    with (job.directory / f"rank_{rank}.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", job.entry, *job.arguments],
            cwd=job.directory,
            env=_rank_environment(job, rank, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  (there are no threads)
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _rank_environment(job: RankJob, rank: int, port: int) -> dict[str, str]:
    """What torchrun sets, and what the job adds."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "SLURM_"))}
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        **job.environment,
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]], until_s: float) -> list[int | None]:
    """Exit statuses; None: had to be ended, as the time was up or another rank had failed."""
    while True:
        statuses = [process.poll() for process in ranks]
        if None not in statuses or time.monotonic() > until_s:
            return statuses
        if any(statuses):
            until_s = min(until_s, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)


def _refuse_failed(job: RankJob, statuses: Sequence[int | None], duration_s: float) -> None:
    """Raise RankFailure, which shows how each rank that failed has ended, if one has."""
    problems = [
        Problem(
            where=f"rank {rank} ({job.directory}/rank_{rank}.txt)",
            found=f"no end in {duration_s:.0f} s"
            if status is None
            else f"exit status {status} after {duration_s:.0f} s",
            expected=f"0 within {job.limit_s:.0f} s",
            remedy="Its last lines:\n" + tail_of(output_of(job.directory, rank)),
        )
        for rank, status in enumerate(statuses)
        if status != 0
    ]
    if problems:
        raise RankFailure(f"The job {job.name!r} failed", problems)


@contextlib.contextmanager
def exits_on_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt.

    So what has been started is ended. The status is a shell's, 128 and the signal's number. Main
    thread only. A signal that is ignored (`nohup`) stays so.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
