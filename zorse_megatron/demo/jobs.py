"""Runs a training job as a user would, with `torchrun`, and shows its progress on one line."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.launch.shared_gpus import SHARE_GPUS

# Many times what the slower of the two jobs takes on two cores; it ends a job that hangs.
TIME_LIMIT_S = 420.0
# What torchrun gets to end its ranks, before it is killed.
END_GRACE_S = 20.0
TAIL_LINES = 25

# Stock's line (`megatron.training.training:training_log`), e.g.
# " iteration        3/      40 | consumed samples: ... | lm loss: 5.039254E+00 | loss scale: ..."
_ITERATION = re.compile(r" iteration +(\d+)/ *(\d+) \|.* lm loss: ([-+.\dEe]+) \|")


@dataclass(frozen=True, kw_only=True)
class DemoJob:
    """One training job on this machine."""

    name: str
    num_ranks: int
    arguments: tuple[str, ...]
    """What follows `-m zorse_megatron.pretrain`."""
    directory: Path
    """Where it runs, so that whatever Megatron leaves behind lies there."""
    on_gpu: bool = False
    """Whether it may use the machine's GPUs."""
    shares_gpus: bool = False
    """Whether there may be fewer of them than ranks."""
    time_limit_s: float = TIME_LIMIT_S

    @property
    def log(self) -> Path:
        """Everything that its ranks print."""
        return self.directory / f"{self.name}.log"

    @property
    def command(self) -> list[str]:
        """The command, as a user would type it."""
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(self.num_ranks)),
            *("-m", "zorse_megatron.pretrain"),
            *self.arguments,
        ]


@dataclass(frozen=True, kw_only=True)
class DemoProgress:
    """What a line of the log says about the iteration that has ended."""

    iteration: int
    num_iterations: int
    loss: float


def progress_in(line: str) -> DemoProgress | None:
    """Read stock's log line of an iteration; None for any other line."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    return DemoProgress(iteration=int(match[1]), num_iterations=int(match[2]), loss=float(match[3]))


def run_job(job: DemoJob, tell: Callable[[DemoProgress], None]) -> float:
    """Run a job to its end and return its duration in seconds.

    Raises RankFailure with the job's last lines when it fails or exceeds its time limit.
    """
    started_s = time.monotonic()
    process = subprocess.Popen(
        job.command,
        cwd=job.directory,
        env=_environment(job),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timer = threading.Timer(job.time_limit_s, _end, [process])
    timer.start()
    try:
        _follow(process, job, tell)
        status = process.wait()
    finally:
        timer.cancel()
        _end(process)
    duration_s = time.monotonic() - started_s
    if status != 0 or duration_s > job.time_limit_s:
        raise _failure(job, status, duration_s)
    return duration_s


def _follow(
    process: subprocess.Popen[str], job: DemoJob, tell: Callable[[DemoProgress], None]
) -> None:
    assert process.stdout is not None
    with job.log.open("w", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(job.command)}\n")
        for line in process.stdout:
            log.write(line)
            log.flush()
            if (progress := progress_in(line)) is not None:
                tell(progress)


def _environment(job: DemoJob) -> dict[str, str]:
    # Unless it is told otherwise, the demo is the same on every machine: on the CPU.
    hidden = {} if job.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    shared = {SHARE_GPUS: "1"} if job.shares_gpus else {}
    return {
        **os.environ,
        # The processes share few cores: one thread each.
        "OMP_NUM_THREADS": "1",
        **hidden,
        **shared,
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _end(process: subprocess.Popen[str]) -> None:
    """End a job that still runs; torchrun passes the signal on to its ranks."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _failure(job: DemoJob, status: int, duration_s: float) -> RankFailure:
    return RankFailure(
        f"The job {job.name!r} failed",
        [
            Problem(
                where=str(job.log),
                found=f"exit status {status} after {duration_s:.0f} s",
                expected=f"0 within {job.time_limit_s:.0f} s",
                remedy="Its last lines:\n" + "\n".join(_tail(job.log)),
            )
        ],
    )


def _tail(log: Path) -> Sequence[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
