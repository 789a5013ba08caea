"""The watch of a job by a clock that is set by hand: what would take minutes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli_samples import FLAGS, write_lab
from zorse_megatron import pretrain
from zorse_megatron.live.hub import Hub, Member
from zorse_megatron.live.root_cause import FailureKind, Limits, Report
from zorse_megatron.live.watcher import last_line

WORLD_SIZE = 3
STEP_S = 0.5


class Job:
    """The watchers of three ranks in one process, without ranks."""

    def __init__(self) -> None:
        self.hub = Hub(WORLD_SIZE, limits=Limits(), describe=str, host="here")
        self.address = f"127.0.0.1 {self.hub.address}"
        self.members = [Member(rank, limits=Limits(), host="here") for rank in (1, 2)]
        self.late: set[int] = set()
        """Ranks that have not found the hub's address so far."""
        self.now_s = 0.0

    def run(self, until_s: float) -> None:
        """Let the watchers that are there work; who leaves closes its connections."""
        while self.now_s < until_s:
            self.now_s += STEP_S
            for _ in range(2):  # what one has said the other one hears
                if not self.hub.is_over:
                    self.hub.work(self.address, self.now_s)
                for member in self.members:
                    address = "" if member.rank in self.late else self.address
                    if not member.is_over:
                        member.work(address, self.now_s)
            if self.hub.is_over:
                self.close()

    def end(self, rank: int, kind: FailureKind) -> None:
        report = Report(rank=rank, kind=kind, reason="came to its end")
        post = self.members[rank - 1] if rank else self.hub
        post.report(report, self.now_s, ended=True)

    def close(self) -> None:
        for connection in [self.hub.listener, *self.hub._members]:
            connection.close()

    @property
    def lines(self) -> list[str]:
        said = [last_line(post, lambda rank: f"rank {rank}") for post in (self.hub, *self.members)]
        return [line for line in said if line]

    @property
    def are_over(self) -> list[bool]:
        return [self.hub.is_over, *(member.is_over for member in self.members)]


@pytest.fixture
def job() -> Iterator[Job]:
    found = Job()
    yield found
    found.close()
    for member in found.members:
        for line in member.sockets:
            line.close()


@pytest.mark.parametrize("kind", [FailureKind.DONE, FailureKind.EXITED_WELL])
def test_who_uploads_for_minutes_has_its_time(kind: FailureKind, job: Job) -> None:
    """All others have come to their end; their watchers wait, as srun would end the last one."""
    job.run(5)
    for rank in (0, 1):
        job.end(rank, kind)
    job.run(300)
    assert job.hub.culprit is None
    assert job.are_over == [False] * WORLD_SIZE
    job.end(2, kind)
    job.run(302)
    assert job.are_over == [True] * WORLD_SIZE
    assert not job.lines


def test_nobody_is_waited_for_longer_than_in_a_collective(job: Job) -> None:
    for rank in (0, 1):
        job.end(rank, FailureKind.EXITED_WELL)
    job.run(599)
    assert job.hub.culprit is None
    job.run(620)
    assert job.hub.culprit is not None and job.hub.culprit.kind is FailureKind.EXITED_WELL
    assert job.are_over[:2] == [True, True] and len(job.lines) == 1


def test_who_comes_when_the_job_has_ended_gives_no_verdict_of_its_own(job: Job) -> None:
    """A rank that still imports when others have failed would have blamed rank 0."""
    job.late.add(2)
    job.run(5)
    job.end(1, FailureKind.FAILED)
    job.run(34)
    assert job.hub.culprit is None, "the late one may still come"
    job.run(60)
    assert job.hub.is_over
    job.late.clear()
    job.run(70)
    late = job.members[-1]
    assert late.stop is not None, "its rank is ended"
    verdict, note = job.lines
    assert verdict == "error: 1 came to its end; the job ends"
    assert note.startswith("rank 2 comes too late: rank 0 is gone")
    assert "error" not in note


def test_one_that_has_come_in_time_says_that_rank_0_is_gone(job: Job) -> None:
    job.run(5)
    job.close()
    job.hub.is_over = True
    job.run(10)
    (line,) = job.lines
    assert line.startswith("error: rank 0 is gone, and so is the process that watched it")


def test_the_time_is_that_of_megatrons_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command, without Megatron."""
    write_lab(tmp_path)
    found: list[Limits] = []

    def watched(_plan: object, limits: Limits, _node: str) -> None:
        found.append(limits)
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "_watched", watched)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for more in ([], ["--distributed-timeout-minutes", "3"]):
        with pytest.raises(KeyboardInterrupt):
            pretrain.run([*FLAGS, *more, "--zorse-plan", str(tmp_path / "plan.json")])
    assert [limits.exit_s for limits in found] == [600, 180]
