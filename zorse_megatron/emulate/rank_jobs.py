"""Runs the ranks of a job on this machine, forked or spawned, and leaves none behind."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zorse_megatron.errors import OutOfTime, Problem, RankFailure
from zorse_megatron.log import say
from zorse_megatron.processes import end_with_parent, free_port, rank_variables

TAIL_LINES = 40
SERVER = "zorse_megatron.emulate.fork_server"
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """`python -m entry ARGUMENTS` as so many ranks on this machine."""

    name: str
    arguments: tuple[str, ...]
    world_size: int
    directory: Path
    """Exists; what the ranks print is left there: see `output_of`."""
    limit_s: float
    entry: str = "zorse_megatron.pretrain"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of all ranks, beside what torchrun would set."""
    working_directory: Path | None = None
    """None: `directory`."""
    grace_after_failure_s: float = 20.0
    """How long the others have to end after one has failed; watched ones do so within seconds."""


@dataclass(frozen=True, kw_only=True)
class RanksEnd:
    """How the ranks of a job ended."""

    job: RankJob
    statuses: tuple[int | None, ...]
    """Exit status of each rank, negative for a signal; None: it had to be ended."""
    wall_s: float

    def check(self) -> None:
        """Raise RankFailure, which shows how each rank that failed has ended, if one has."""
        job = self.job
        problems = [
            Problem(
                where=f"rank {rank} ({job.directory}/rank_{rank}.txt)",
                found=f"no end in {self.wall_s:.0f} s"
                if status is None
                else f"exit status {status} after {self.wall_s:.0f} s",
                expected=f"0 within {job.limit_s:.0f} s",
                remedy="Its last lines:\n" + tail_of(output_of(job.directory, rank)),
            )
            for rank, status in enumerate(self.statuses)
            if status != 0
        ]
        if problems:
            failure = RankFailure if any(self.statuses) else OutOfTime
            raise failure(f"The job {job.name!r} failed", problems)


def output_of(directory: Path | str, rank: int) -> str:
    """What a rank has printed."""
    return Path(directory, f"rank_{rank}.txt").read_text(errors="replace")


def tail_of(output: str) -> str:
    """Its last lines."""
    return "\n".join(output.splitlines()[-TAIL_LINES:])


# Starts a server that forks ranks (`fork_server`), and gives it jobs.


_START_TIMEOUT_S = 180.0
# What the server needs beyond a job's own limit to end the ranks and answer.
_ANSWER_MARGIN_S = 30.0
# From the end of its output to the end of the server.
_END_TIMEOUT_S = 5.0


class ForkClient:
    """A server, for several jobs. Not for use by two threads at once."""

    def __init__(
        self, module: str, *, on_gpu: bool = False, working_directory: Path | None = None
    ) -> None:
        """Start `module`, which calls `fork_server.serve`. Raises RankFailure where that fails.

        `on_gpu`: its ranks may use the GPUs of this machine.
        """
        self.module = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the server)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=working_directory,
            env=server_environment(on_gpu=on_gpu),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )
        self._answer(_START_TIMEOUT_S)

    def run(self, job: RankJob) -> RanksEnd:
        """Run a job to its end. Raises RankFailure where the server has gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the lack of an answer tells why
            self._process.stdin.write(json.dumps(asdict(job), default=str) + "\n")
        answer = self._answer(job.limit_s + _ANSWER_MARGIN_S)
        return RanksEnd(job=job, statuses=tuple(answer["statuses"]), wall_s=answer["wall_s"])

    def close(self) -> None:
        """End the server, and with it whatever it still runs."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._end(_ANSWER_MARGIN_S)
        self._log.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        in_time = bool(select.select([stdout], [], [], timeout_s)[0])
        if in_time and (line := stdout.readline()):
            return dict(json.loads(line))
        # No line in time: its output has ended.
        status = self._end(_END_TIMEOUT_S if in_time else 0.0)
        found = f"exit status {status}" if in_time else f"no answer within {timeout_s:.0f} s"
        self._log.seek(0)
        raise RankFailure.of(
            "The process that forks the ranks is gone",
            where=self.module,
            found=found,
            expected="one line of JSON",
            remedy="Its last lines:\n" + tail_of(self._log.read()),
        )

    def _end(self, timeout_s: float) -> int:
        """Exit status of the server, which is killed if it does not end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        self._process.kill()
        return self._process.wait()


def server_environment(*, on_gpu: bool = False) -> dict[str, str]:
    """The environment of a server, in which nothing starts a thread before the fork."""
    # A parent that has asked the CUDA runtime for GPUs leaves its forked children with a CUDA that
    # fails; NVML (torch's "PYTORCH_NVML_BASED_CUDA_CHECK") does no harm.
    gpus = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **gpus,
        # As if rank 0 of one: the server must not print for each rank what rank 0 prints.
        "RANK": "0",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }


RunJob = Callable[[RankJob], None]
"""Runs a job to its end. Raises RankFailure unless all ranks end with status 0 in time."""


@contextlib.contextmanager
def runner_here(*, has_gpu: bool) -> Iterator[RunJob]:
    """What runs jobs on this machine; what it has started ends with the block.

    Ranks are forked from a process that has Megatron imported. Where its children cannot use CUDA,
    for one as an imported package has started it, ranks import everything themselves, and a line
    says so.
    """
    try:
        server = ForkClient(SERVER, on_gpu=has_gpu)
    except RankFailure as failure:
        if not has_gpu:
            raise
        (problem,) = failure.problems
        _, *log = problem.remedy.strip().splitlines()
        reason = log[-1] if log else problem.found
        say(f"each rank imports Megatron itself, which takes longer: {reason}")
        yield run_spawned
        return
    with contextlib.closing(server) as client:
        yield lambda job: client.run(job).check()


def run_spawned(job: RankJob) -> None:
    """Run each rank as a process of its own. Raises RankFailure."""
    started_s, port = time.monotonic(), free_port()
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_spawned(job, n, port)) for n in range(job.world_size)]
        statuses = _wait(ranks, job, started_s + job.limit_s)
    RanksEnd(job=job, statuses=statuses, wall_s=time.monotonic() - started_s).check()


@contextlib.contextmanager
def _spawned(job: RankJob, rank: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A rank in a session of its own, of which nothing is left at the end of the block.

    Nor after this process, if that is killed and does not come to the end of the block.
    """
    with (job.directory / f"rank_{rank}.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", job.entry, *job.arguments],
            cwd=job.working_directory or job.directory,
            env=_rank_environment(job, rank, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  (no thread holds a lock)
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
    return {
        **kept,
        **rank_variables(rank, job.world_size, port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        **job.environment,
    }


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], job: RankJob, until_s: float
) -> tuple[int | None, ...]:
    """Exit statuses; None: had to be ended, as the time was up or another rank had failed."""
    while True:
        statuses = tuple(process.poll() for process in ranks)
        if None not in statuses or time.monotonic() > until_s:
            return statuses
        if any(statuses):
            until_s = min(until_s, time.monotonic() + job.grace_after_failure_s)
        time.sleep(_POLL_S)


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
