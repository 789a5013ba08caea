"""Starts a server that forks ranks (`fork_server`), and gives it jobs."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zorse_megatron.errors import Problem, RankFailure

TAIL_LINES = 40
# After one rank has failed the others wait for it in vain: they get this long to fail as well.
GRACE_AFTER_FAILURE_S = 5.0
_START_TIMEOUT_S = 180.0
# What the server needs beyond a job's own timeout to end the ranks and answer.
_ANSWER_MARGIN_S = 30.0
# From the end of its output to the end of the server.
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ForkedJob:
    """`python -m entry` with `argv`, as `world_size` ranks on this machine."""

    entry: str
    argv: Sequence[str]
    world_size: int
    timeout_s: float
    output_directory: str
    """Where the ranks' outputs go: see `output_of`."""
    working_directory: str = field(default_factory=os.getcwd)
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside what torchrun sets."""
    grace_after_failure_s: float = GRACE_AFTER_FAILURE_S


@dataclass(frozen=True, kw_only=True)
class ForkedEnd:
    """How the ranks of a job ended."""

    statuses: tuple[int, ...]
    """Exit status of each rank; negative: the signal that ended it."""
    had_to_be_ended: tuple[int, ...]
    """Ranks that did not end by themselves."""
    timed_out: bool
    wall_s: float


def output_of(directory: Path | str, rank: int) -> str:
    """What a rank has printed."""
    return Path(directory, f"rank_{rank}.txt").read_text(errors="replace")


def tail_of(output: str) -> str:
    """Its last lines."""
    return "\n".join(output.splitlines()[-TAIL_LINES:])


class ForkClient:
    """A server, for several jobs. Not for use by two threads at once."""

    def __init__(self, module: str, *, working_directory: Path | None = None) -> None:
        """Start `module`, which calls `fork_server.serve`. Raises RankFailure where that fails."""
        self.module = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the server)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=working_directory,
            env=server_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )
        self._answer(_START_TIMEOUT_S)

    def run(self, job: ForkedJob) -> ForkedEnd:
        """Run a job to its end. Raises RankFailure where the server has gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the lack of an answer tells why
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        answer = self._answer(job.timeout_s + _ANSWER_MARGIN_S)
        return ForkedEnd(
            statuses=tuple(answer["statuses"]),
            had_to_be_ended=tuple(answer["had_to_be_ended"]),
            timed_out=answer["timed_out"],
            wall_s=answer["wall_s"],
        )

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
        problem = Problem(
            where=self.module,
            found=found,
            expected="one line of JSON",
            remedy="Its last lines:\n" + tail_of(self._log.read()),
        )
        raise RankFailure("The process that forks the ranks is gone", [problem])

    def _end(self, timeout_s: float) -> int:
        """Exit status of the server, which is killed if it does not end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        self._process.kill()
        return self._process.wait()


def server_environment() -> dict[str, str]:
    """The environment of a server, in which nothing starts a thread before the fork."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Its ranks run on CPU; and a parent that has asked the CUDA runtime for GPUs leaves its
        # forked children with a CUDA that fails.
        "CUDA_VISIBLE_DEVICES": "",
        # As if rank 0 of one: the server must not print for each rank what rank 0 prints.
        "RANK": "0",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }
