"""Runs the ranks of emulated jobs, in processes that are forked from one with Megatron imported."""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from zorse_megatron.emulate.jobs.emulated_job import VARIABLE
from zorse_megatron.errors import Problem, RankFailure

_START_TIMEOUT_S = 180.0
_ANSWER_MARGIN_S = 30.0
_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks of a job ended."""

    statuses: tuple[int | None, ...]
    """Exit status of each rank; None: it had to be ended."""
    wall_s: float
    """On this machine."""
    directory: Path

    @property
    def succeeded(self) -> bool:
        """Whether all ranks exited with status 0."""
        return not any(status != 0 for status in self.statuses)

    def tail(self, rank: int) -> str:
        """The last lines that a rank printed."""
        text = (self.directory / f"rank_{rank}.txt").read_text(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def failure(self) -> RankFailure:
        """The error that shows how each failed rank ended."""
        return RankFailure(
            "The emulated job failed",
            [
                Problem(
                    where=f"rank {rank}",
                    found="no end in time" if status is None else f"exit status {status}",
                    expected="0",
                    remedy="Its last lines:\n" + self.tail(rank),
                )
                for rank, status in enumerate(self.statuses)
                if status != 0
            ],
        )


class RankServer:
    """Starts `fork_server` once for several jobs. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the server)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zorse_megatron.emulate.on_ranks.fork_server"],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )
        self._answer(_START_TIMEOUT_S)

    def __enter__(self) -> "RankServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        world_size: int,
        job_file: Path,
        directory: Path,
        timeout_s: float,
        entry: str = "zorse_megatron.emulate.on_ranks.rank_main",
    ) -> Ended:
        """Run the ranks of a job to their end. `argv`: what the module `entry` is given."""
        job = {
            "entry": entry,
            "argv": list(argv),
            "world_size": world_size,
            "timeout_s": timeout_s,
            "env": {VARIABLE: str(job_file)},
            "directory": str(directory),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        answer = self._answer(timeout_s + _ANSWER_MARGIN_S)
        return Ended(
            statuses=tuple(answer["statuses"]), wall_s=answer["wall_s"], directory=directory
        )

    def close(self) -> None:
        """End the server, and with it whatever it still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_ANSWER_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if select.select([stdout], [], [], timeout_s)[0] and (line := stdout.readline()):
            return dict(json.loads(line))
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().splitlines()[-_TAIL_LINES:]
        problem = Problem(
            where="zorse_megatron.emulate.on_ranks.fork_server",
            found=f"no answer within {timeout_s:.0f} s",
            expected="one line of JSON",
            remedy="Its last lines:\n" + "\n".join(lines),
        )
        raise RankFailure("The process that forks the ranks is gone", [problem])


def _environment() -> dict[str, str]:
    """Nothing in the server may start a thread before it forks."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": "0",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }
