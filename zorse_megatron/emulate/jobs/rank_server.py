"""Runs the ranks of emulated jobs, in processes that are forked from one with Megatron imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from zorse_megatron.emulate.forks.fork_client import ForkClient, ForkedJob, output_of, tail_of
from zorse_megatron.emulate.jobs.emulated_job import VARIABLE
from zorse_megatron.errors import Problem, RankFailure


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
        return tail_of(output_of(self.directory, rank))

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
    """Starts `on_ranks.server_main` once for several jobs. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._client = ForkClient("zorse_megatron.emulate.on_ranks.server_main")

    def __enter__(self) -> "RankServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

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
        end = self._client.run(
            ForkedJob(
                entry=entry,
                argv=argv,
                world_size=world_size,
                timeout_s=timeout_s,
                output_directory=str(directory),
                env={VARIABLE: str(job_file)},
            )
        )
        statuses = (
            None if rank in end.had_to_be_ended else status
            for rank, status in enumerate(end.statuses)
        )
        return Ended(statuses=tuple(statuses), wall_s=end.wall_s, directory=directory)
