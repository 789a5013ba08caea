"""Starts the ranks of a job, and ends all of them when its time is up."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from zorse_megatron.emulate.forks.fork_client import ForkClient, ForkedJob, output_of, tail_of
from zorse_megatron.ends_with_parent import end_with_parent
from zorse_megatron.errors import Problem, RankFailure

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


class Runner(Protocol):
    """Runs one job after another."""

    def run(self, job: RankJob) -> None:
        """Run it to its end. Raises RankFailure unless all ranks end with status 0 in time."""
        ...


class SpawnedRanks:
    """Each rank is a process that imports everything itself; for GPUs, which no fork survives."""

    def run(self, job: RankJob) -> None:
        """Run it to its end. Raises RankFailure unless all ranks end with status 0 in time."""
        started_s = time.monotonic()
        statuses = spawned_statuses(job)
        if any(status != 0 for status in statuses):
            raise job_failure(job, statuses, time.monotonic() - started_s)


class ForkedRanks:
    """Ranks are forked from a process that has Megatron imported, on the CPU."""

    def __init__(self) -> None:
        self._client = ForkClient("zorse_megatron.doctor.on_ranks.server_main")

    def run(self, job: RankJob) -> None:
        """Run it to its end. Raises RankFailure unless all ranks end with status 0 in time."""
        end = self._client.run(
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
        statuses = [
            None if rank in end.had_to_be_ended else status
            for rank, status in enumerate(end.statuses)
        ]
        if any(status != 0 for status in statuses):
            raise job_failure(job, statuses, end.wall_s)

    def close(self) -> None:
        """End the process that forks."""
        self._client.close()


@contextlib.contextmanager
def runner_here(*, has_gpu: bool) -> Iterator[Runner]:
    """The runner for this machine; what it started ends with the block."""
    if has_gpu:
        yield SpawnedRanks()
        return
    forked = ForkedRanks()
    try:
        yield forked
    finally:
        forked.close()


def spawned_statuses(job: RankJob) -> list[int | None]:
    """Run each rank as a process; exit statuses, None of those that had to be ended."""
    until_s, port = time.monotonic() + job.limit_s, _free_port()
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
            env=rank_environment(job, rank, port),
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


def rank_environment(job: RankJob, rank: int, port: int) -> dict[str, str]:
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], until_s: float) -> list[int | None]:
    """Exit statuses; None: had to be ended, as the time was up or another rank had failed."""
    while True:
        statuses = [process.poll() for process in ranks]
        if None not in statuses or time.monotonic() > until_s:
            return statuses
        if any(statuses):
            until_s = min(until_s, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)


def job_failure(job: RankJob, statuses: Sequence[int | None], duration_s: float) -> RankFailure:
    """The error that shows how each failed rank ended."""
    return RankFailure(
        f"The job {job.name!r} failed",
        [
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
        ],
    )
