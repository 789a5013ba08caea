"""Run an entry module as the ranks of a job, in milliseconds instead of 8 s of imports per rank.

    result = run_ranks(["--num-layers", "4", ...], world_size=4, timeout_s=60)
    result.check()
    print(result.outputs[3])

A `MegatronServer` (see `server.py`) imports Megatron once and forks the ranks of every job.
"""

import atexit
import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT

from zorse_megatron.emulate.rank_jobs import (
    ForkClient,
    RankJob,
    RanksEnd,
    output_of,
    tail_of,
)
from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.launch.rank_environment import SHARE_GPUS, VARIABLE

REPOSITORY = Path(__file__).parents[2]
ON_GPU = os.environ.get("ZORSE_TEST_DEVICE", "cpu") == "cuda"
"""Whether ranks run on the machine's GPUs."""
ONE_QUEUE = {VARIABLE: "1"}
"""What stock demands of tensor parallelism before Blackwell, and in CPU mode; a plan does not."""
GRACE_AFTER_FAILURE_S = 5.0
"""After one rank has failed the others wait for it in vain: they get this long to fail as well."""
GPU_FACTOR = 4.0
"""On GPUs ranks start CUDA and connect over sockets first."""


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
        self._client = ForkClient(
            "tests.megatron.server", on_gpu=ON_GPU, working_directory=REPOSITORY
        )

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
            job = RankJob(
                name=entry,
                entry=entry,
                arguments=tuple(map(str, argv)),
                world_size=world_size,
                directory=Path(output_dir),
                limit_s=timeout_s,
                environment=dict(env or {}),
                working_directory=directory,
                grace_after_failure_s=grace_after_failure_s,
            )
            end = self.run_job(_on_gpu(job) if ON_GPU else job)
            result = RunResult(
                returncodes=tuple(-SIGABRT if each is None else each for each in end.statuses),
                outputs=tuple(output_of(job.directory, rank) for rank in range(world_size)),
                wall_s=end.wall_s,
            )
        if None in end.statuses and end.wall_s > end.job.limit_s:
            raise rank_failure(f"The ranks have not ended after {end.job.limit_s} s", result)
        return result

    def run_job(self, job: RankJob) -> RanksEnd:
        """Run a job to its end."""
        return self._client.run(job)

    def close(self) -> None:
        """End the server, and with it whatever it still runs."""
        self._client.close()


def _on_gpu(job: RankJob) -> RankJob:
    """Ranks may share a GPU."""
    return dataclasses.replace(
        job, limit_s=job.limit_s * GPU_FACTOR, environment={SHARE_GPUS: "1", **job.environment}
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
