"""Run an entry module as the ranks of a job, in milliseconds instead of 8 s of imports per rank.

    result = run_ranks(["--num-layers", "4", ...], world_size=4, timeout_s=60)
    result.check()
    print(result.outputs[3])

A `MegatronServer` (see `server.py`) imports Megatron once and forks the ranks of every job.
"""

import atexit
import functools
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.emulate.rank_jobs import (
    GRACE_AFTER_FAILURE_S,
    ForkClient,
    ForkedEnd,
    ForkedJob,
    RankJob,
    output_of,
    spawned_statuses,
    tail_of,
)
from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.launch.rank_environment import SHARE_GPUS

REPOSITORY = Path(__file__).parents[2]
ON_GPU = os.environ.get("ZORSE_TEST_DEVICE", "cpu") == "cuda"
"""Whether ranks run on the machine's GPUs. Not verified: see docs/limits.md."""
GPU_START_FACTOR = 4.0
"""Ranks that are not forked import everything themselves."""


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
                remedy="Its last lines:\n" + tail_of(output),
            )
            for rank, (code, output) in enumerate(
                zip(result.returncodes, result.outputs, strict=True)
            )
        ],
    )


class MegatronServer:
    """A process that has Megatron imported. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._client = ForkClient("tests.megatron.server", working_directory=REPOSITORY)

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
        if ON_GPU:
            return _on_gpu(argv, world_size, entry, timeout_s, dict(env or {}))
        with tempfile.TemporaryDirectory(prefix="zorse-ranks-") as output_dir:
            end = self.run_job(
                ForkedJob(
                    entry=entry,
                    argv=[str(word) for word in argv],
                    world_size=world_size,
                    timeout_s=timeout_s,
                    output_directory=output_dir,
                    working_directory=str(directory),
                    env=dict(env or {}),
                    grace_after_failure_s=grace_after_failure_s,
                )
            )
            result = RunResult(
                returncodes=end.statuses,
                outputs=tuple(output_of(output_dir, rank) for rank in range(world_size)),
                wall_s=end.wall_s,
            )
        if end.timed_out:
            raise rank_failure(f"The ranks have not ended after {timeout_s} s", result)
        return result

    def run_job(self, job: ForkedJob) -> ForkedEnd:
        """Run a job to its end."""
        return self._client.run(job)

    def close(self) -> None:
        """End the server, and with it whatever it still runs."""
        self._client.close()


def _on_gpu(
    argv: Sequence[str], world_size: int, entry: str, timeout_s: float, env: dict[str, str]
) -> RunResult:
    """Each rank a process of its own, as no fork survives with CUDA; ranks may share a GPU."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zorse-ranks-") as directory:
        job = RankJob(
            name=entry,
            entry=entry,
            arguments=tuple(map(str, argv)),
            world_size=world_size,
            directory=Path(directory),
            limit_s=timeout_s * GPU_START_FACTOR,
            environment={"PYTHONPATH": str(REPOSITORY), SHARE_GPUS: "1", **env},
        )
        statuses = spawned_statuses(job)
        return RunResult(
            returncodes=tuple(-9 if status is None else status for status in statuses),
            outputs=tuple(output_of(directory, rank) for rank in range(world_size)),
            wall_s=time.monotonic() - started_s,
        )


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
