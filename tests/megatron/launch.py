"""Run an entry module as the ranks of a job, in milliseconds instead of 8 s of imports per rank.

    result = run_ranks(["--num-layers", "4", ...], world_size=4, timeout_s=60)
    result.check()
    print(result.outputs[3])

A `MegatronServer` (see `server.py`) imports Megatron once and forks the ranks of every job.
"""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zorse_megatron.errors import Problem, RankFailure

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
# What the server needs beyond a job's own timeout to end the ranks and answer.
ANSWER_MARGIN_S = 30.0
# After one rank has failed the others wait for it in vain: they get this long to fail as well.
GRACE_AFTER_FAILURE_S = 5.0
TAIL_LINES = 40


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How the ranks of one job ended, and everything each of them printed."""

    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]
    wall_s: float

    def check(self) -> "RunResult":
        """Raise RankFailure with the last lines of every rank unless all ended with status 0."""
        if any(self.returncodes):
            raise rank_failure("A rank failed", self)
        return self


def rank_failure(title: str, result: RunResult) -> RankFailure:
    """Build the error that shows how each rank ended and what it printed last."""
    return RankFailure(
        title,
        [
            Problem(
                where=f"rank {rank}",
                found=f"exit status {code} after {result.wall_s:.1f} s",
                expected="0",
                remedy="Its last lines:\n" + "\n".join(output.splitlines()[-TAIL_LINES:]),
            )
            for rank, (code, output) in enumerate(
                zip(result.returncodes, result.outputs, strict=True)
            )
        ],
    )


class MegatronServer:
    """A process that has Megatron imported. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the server)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.server"],
            cwd=REPOSITORY,
            env=server_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )
        self._answer(START_TIMEOUT_S)

    def run_ranks(
        self,
        argv: Sequence[str],
        world_size: int,
        *,
        entry: str = "zorse_megatron.pretrain",
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        grace_after_failure_s: float = GRACE_AFTER_FAILURE_S,
        directory: Path = REPOSITORY,
    ) -> RunResult:
        """Run the module `entry` with `argv` as `world_size` ranks in `directory`.

        Raises RankFailure when they have not all ended after `timeout_s`. When one rank fails the
        others are ended after `grace_after_failure_s`, and the result tells.
        """
        with tempfile.TemporaryDirectory(prefix="zorse-ranks-") as output_dir:
            job = {
                "argv": [str(word) for word in argv],
                "world_size": world_size,
                "entry": entry,
                "timeout_s": timeout_s,
                "grace_after_failure_s": grace_after_failure_s,
                "env": dict(env or {}),
                "output_dir": output_dir,
                "directory": str(directory),
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            answer = self._answer(timeout_s + ANSWER_MARGIN_S)
            outputs = [Path(output_dir, f"rank_{rank}.txt") for rank in range(world_size)]
            result = RunResult(
                returncodes=tuple(answer["returncodes"]),
                outputs=tuple(path.read_text(errors="replace") for path in outputs),
                wall_s=answer["wall_s"],
            )
        if answer["timed_out"]:
            raise rank_failure(f"The ranks have not ended after {timeout_s} s", result)
        return result

    def close(self) -> None:
        """End the server, and with it whatever it still runs."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=ANSWER_MARGIN_S)
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
        raise RankFailure(
            "The Megatron server is gone",
            [
                Problem(
                    where="tests.megatron.server",
                    found=f"no answer within {timeout_s} s",
                    expected="one line of JSON",
                    remedy="Its last lines:\n"
                    + "\n".join(self._log.read().splitlines()[-TAIL_LINES:]),
                )
            ],
        )


def server_environment() -> dict[str, str]:
    """Return the environment of the server, in which nothing starts a thread before the fork."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # These tests run on CPU everywhere; and a parent that has asked the CUDA runtime for GPUs
        # leaves its forked children with a CUDA that fails.
        "CUDA_VISIBLE_DEVICES": "",
        # As if rank 0 of one: the server must not print for each rank what rank 0 prints.
        "RANK": "0",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }


@functools.cache
def default_server() -> MegatronServer:
    """The server of this process, started at the first use."""
    server = MegatronServer()
    atexit.register(server.close)
    return server


def run_ranks(
    argv: Sequence[str],
    world_size: int,
    *,
    entry: str = "zorse_megatron.pretrain",
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    grace_after_failure_s: float = GRACE_AFTER_FAILURE_S,
) -> RunResult:
    """`MegatronServer.run_ranks` on this process's own server."""
    return default_server().run_ranks(
        argv,
        world_size,
        entry=entry,
        timeout_s=timeout_s,
        env=env,
        grace_after_failure_s=grace_after_failure_s,
    )
