"""The watch of a job: who is blamed and when, who is slow, and how large it may be."""

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.unit.cli_samples import FLAGS, write_lab
from zorse_megatron import pretrain
from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.live import hub_address, start_watch, watcher
from zorse_megatron.live.hub import Hub, Member
from zorse_megatron.live.listener import Listener
from zorse_megatron.live.root_cause import (
    FailureKind,
    Report,
    RootCause,
    Timeouts,
    report_of_end,
)
from zorse_megatron.live.watched_rank import SharedState, WatchedRank
from zorse_megatron.processes import free_port

ALL = range(3)
WRONG = PlanError("No", [Problem(where="plan.json", found="a", expected="b", remedy="c")])


def root_cause(*found: tuple[int, FailureKind, float], ended: tuple[int, ...] = ()) -> RootCause:
    new = RootCause(3, Timeouts())
    for rank, kind, at_s in found:
        new.note(Report(rank=rank, kind=kind, reason=kind.name), at_s)
    new.ended.update(ended)
    return new


def blamed(given: RootCause, now_s: float, *, late: tuple[int, ...] = ()) -> int | None:
    culprit = given.culprit(now_s, joined=ALL, late=late)
    return None if culprit is None else culprit.rank


@pytest.mark.parametrize(
    ("found", "told_s", "rank"),
    [
        ([(0, FailureKind.LOST_CONTACT, 0.0), (2, FailureKind.KILLED, 0.1)], 0.4, 2),
        ([(0, FailureKind.FAILED, 0.0), (2, FailureKind.KILLED, 0.1)], 0.4, 2),
        ([(0, FailureKind.FAILED, 0.0), (2, FailureKind.FAILED, 0.1)], 0.5, 0),
        ([(0, FailureKind.ABORTED, 0.0), (1, FailureKind.VANISHED, 1.0)], 1.3, 1),
        ([(0, FailureKind.LOST_CONTACT, 0.0), (1, FailureKind.SILENT, 14.0)], 14.3, 1),
        ([(0, FailureKind.LOST_CONTACT, 0.0), (1, FailureKind.LOST_CONTACT, 0.1)], 20.0, 0),
        ([(1, FailureKind.EXITED, 0.0)], 10.0, 1),
        ([(1, FailureKind.EXITED_WELL, 0.0)], 600.0, 1),
        ([(1, FailureKind.EXITED_WELL, 0.0), (2, FailureKind.KILLED, 100.0)], 100.3, 2),
        ([(1, FailureKind.EXITED_WELL, 0.0), (0, FailureKind.LOST_CONTACT, 0.1)], 1.0, 1),
        # Its own fault; and the watchdog's, which it was left to by the one that has exited.
        ([(1, FailureKind.EXITED_WELL, 0.0), (0, FailureKind.ABORTED, 30.0)], 32.0, 0),
        ([(1, FailureKind.EXITED_WELL, 0.0), (0, FailureKind.ABORTED, 500.0)], 502.0, 1),
        ([(1, FailureKind.EXITED, 0.0), (0, FailureKind.LOST_CONTACT, 0.1)], 1.0, 1),
        ([(1, FailureKind.REFUSED, 0.0)], 20.0, 1),
        ([(1, FailureKind.REFUSED_EARLY, 0.0)], 2.0, 1),
        ([(1, FailureKind.REFUSED, 0.0), (0, FailureKind.LOST_CONTACT, 0.1)], 1.0, 1),
        ([(1, FailureKind.ASKED_TO_END, 0.0), (0, FailureKind.LOST_CONTACT, 0.1)], 3.0, 1),
    ],
)
def test_the_likeliest_cause_is_blamed_when_others_had_their_time(
    found: list[tuple[int, FailureKind, float]], told_s: float, rank: int
) -> None:
    given = root_cause(*found)
    assert blamed(given, told_s - 0.01) is None
    assert blamed(given, told_s + 0.01) == rank


def test_a_rank_that_is_overdue_may_be_the_reason() -> None:
    given = root_cause((0, FailureKind.ABORTED, 0.0))
    assert blamed(given, 5.0, late=(2,)) is None
    assert blamed(root_cause((0, FailureKind.KILLED, 0.0)), 5.0, late=(2,)) == 0


def test_ranks_that_have_not_joined_are_waited_for() -> None:
    given = root_cause((1, FailureKind.KILLED, 0.0))
    assert given.culprit(29.0, joined=(0, 1), late=()) is None
    culprit = given.culprit(31.0, joined=(0, 1), late=())
    assert culprit is not None and culprit.rank == 1


def test_a_rank_that_joins_last_is_heard_before_any_is_blamed() -> None:
    """A plan that is bad on every node, by a name of each node's own."""
    given = root_cause((0, FailureKind.REFUSED_EARLY, 0.0), ended=(0, 1))
    given.note(Report(rank=1, kind=FailureKind.REFUSED_EARLY, reason="another name"), 1.0)
    given.met_s = 5.0
    assert blamed(given, 6.9) is None
    assert blamed(given, 7.1) == 0
    given.note(Report(rank=2, kind=FailureKind.REFUSED_EARLY, reason="a third name"), 5.1)
    given.ended.add(2)
    assert blamed(given, 7.1) is None


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.EXITED,
        FailureKind.ASKED_TO_END,
        FailureKind.REFUSED,
        FailureKind.REFUSED_EARLY,
        FailureKind.FAILED,
    ],
)
def test_what_all_ranks_do_is_no_ranks_fault(kind: FailureKind) -> None:
    found = [(rank, kind, 0.1 * rank) for rank in ALL]
    assert blamed(root_cause(*found), 100.0) is None
    assert blamed(root_cause(*found[:2]), 100.0) == 0


def test_work_that_is_done_is_no_fault() -> None:
    done = [(rank, FailureKind.DONE, 0.0) for rank in ALL]
    assert blamed(root_cause(*done, ended=(0, 1, 2)), 100.0) is None
    assert blamed(root_cause(*done[:2], (2, FailureKind.KILLED, 1.0)), 100.0) == 2


def test_how_long_a_rank_has_suffered_counts_from_its_first_word() -> None:
    given = root_cause((0, FailureKind.LOST_CONTACT, 0.0), (0, FailureKind.LOST_CONTACT, 15.0))
    assert blamed(given, 20.1) == 0


@pytest.mark.parametrize(
    ("status", "word", "kind", "reason"),
    [
        (
            -9,
            "",
            FailureKind.KILLED,
            "was killed by signal 9 (SIGKILL): its node had no memory left",
        ),
        (-11, "DONE:", FailureKind.KILLED, "was killed by signal 11 (SIGSEGV)"),
        (-6, "", FailureKind.ABORTED, "was killed by signal 6 (SIGABRT)"),
        (-15, "", FailureKind.ASKED_TO_END, "was ended by SIGTERM"),
        (7, "", FailureKind.LEFT, "ended with status 7, without a word"),
        (1, "FAILED:failed (ValueError: x: y)", FailureKind.FAILED, "failed (ValueError: x: y)"),
        (
            0,
            "EXITED_WELL:has exited alone, with status 0,",
            FailureKind.EXITED_WELL,
            "has exited alone, with status 0,",
        ),
        (0, "DONE:", FailureKind.DONE, ""),
        (1, "DONE:", FailureKind.LEFT, "ended with status 1, with all its work done,"),
    ],
)
def test_how_a_process_ends_says_what_befell_it(
    status: int, word: str, kind: FailureKind, reason: str
) -> None:
    report = report_of_end(1, status=status, word=word, phase="", memory_ran_out=True)
    assert (report.kind, report.reason, report.status) == (kind, reason, status)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (ValueError("x: y\nz"), FailureKind.FAILED, "failed (ValueError: x: y)"),
        (SystemExit(), FailureKind.EXITED_WELL, "has exited alone, with status 0,"),
        (SystemExit("no"), FailureKind.EXITED, "has exited alone, with status 1,"),
        (WRONG, FailureKind.REFUSED, None),
        (None, FailureKind.DONE, ""),
    ],
)
def test_the_last_word_of_a_rank_is_understood(
    error: BaseException | None, kind: FailureKind, reason: str | None
) -> None:
    shared = SharedState()
    with contextlib.suppress(BaseException), WatchedRank(shared, Timeouts()).last_words():
        if error is not None:
            raise error
    report = report_of_end(
        0, status=0, word=shared.exit_reason.read(), phase="", memory_ran_out=False
    )
    assert report.kind is kind
    assert reason is None or report.reason == reason


# By a clock that is set.

WORLD_SIZE = 3
STEP_S = 0.5


TOKEN = "7" * 32


def hub_of(num_ranks: int, told: list[str] | None = None) -> Hub:
    """A hub, and where to find it."""
    return Hub(
        num_ranks,
        Listener("127.0.0.1", 0, TOKEN, is_one_node=True),
        timeouts=Timeouts(),
        describe=str,
        host="node 0",
        tell=[].append if told is None else told.append,
    )


def member(rank: int) -> Member:
    return Member(
        rank,
        timeouts=Timeouts(),
        describe=lambda each: f"rank {each}",
        host="node 0",
        speaks=rank == 1,
    )


class Job:
    """The watchers of three ranks in one process, without ranks."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.hub = hub_of(WORLD_SIZE, self.told)
        self.address = f"127.0.0.1 {self.hub.listener.port} {TOKEN}"
        self.members = [member(rank) for rank in (1, 2)]
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
        self.hub.listener.close()
        for connection in self.hub._members:
            connection.close()

    @property
    def lines(self) -> list[str]:
        return [post.last_line for post in (self.hub, *self.members) if post.last_line]

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


def test_who_is_missing_is_told_before_it_is_given_up(job: Job) -> None:
    job.late.add(2)
    job.run(25)
    assert not job.told
    job.run(30)
    assert job.told == ["after 25 s rank 2 is still missing; the others wait 600 s"]
    job.run(599)
    assert job.hub.culprit is None and len(job.told) == 1
    job.run(620)
    assert job.hub.culprit is not None and job.hub.culprit.rank == 2


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
    found: list[Timeouts] = []

    def watched(_plan: object, timeouts: Timeouts, *_: object) -> None:
        found.append(timeouts)
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "_watched", watched)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for more in ([], ["--distributed-timeout-minutes", "3"]):
        with pytest.raises(KeyboardInterrupt):
            pretrain.run([*FLAGS, *more, "--zorse-plan", str(tmp_path / "plan.json")])
    assert [timeouts.exit_s for timeouts in found] == [600, 180]


def test_who_interrupts_a_job_gets_no_traceback_of_each_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_argv: object, *, setup: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(pretrain, "run", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        pretrain.main([])
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err == ""


# Large jobs.


@pytest.fixture
def file_limit() -> Iterator[int]:
    """How many files this process may have if it asks for more."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_a_watcher_waits_for_more_files_than_select_knows(
    file_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not wait, and kept a core busy for as long as the job ran."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(file_limit, 4096), file_limit))
    ours, theirs = socket.socketpair()
    beyond = socket.socket(fileno=os.dup2(ours.fileno(), 2000))
    rank = os.posix_spawnp("sleep", ["sleep", "0.5"], os.environ)
    shared, looks = SharedState(), 0

    class Post(Member):
        @property
        def is_joined(self) -> bool:
            return True

        def report(self, report: Report, now_s: float, *, ended: bool) -> None:
            self.is_over = ended

        @property
        def sockets(self) -> list[Any]:
            return [beyond]

        def work(self, address: str, now_s: float) -> None:
            nonlocal looks
            looks += 1

    shared.exit_reason.write(f"{FailureKind.DONE.name}:")
    monkeypatch.setattr(watcher, "end_as", lambda status: None)
    watcher.Watcher(
        rank=1,
        process=rank,
        shared=shared,
        post=Post(1, timeouts=Timeouts(), describe=str, host="here", speaks=True),
        timeouts=Timeouts(),
        find_hub=os.getpid,
        passed_on=[],
        saved=str,
    ).run()
    assert 1 <= looks <= 20
    for each in (ours, theirs, beyond):
        each.close()


def test_a_watcher_may_have_as_many_files_as_the_system_lets_it(file_limit: int) -> None:
    """With 1,024, the hub of a larger job left ranks waiting, and they took it for silent."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(file_limit, 1024), file_limit))
    start_watch._allow_many_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (file_limit, file_limit)


@pytest.mark.parametrize("is_over", [False, True])
def test_ranks_that_are_started_again_wait_for_the_hub_of_this_time(
    is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun keeps its store, and an agent that comes back counts its starts from 0.

    Under keys with these counts ranks never met, or found the hub of before and ended the new job.
    """
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    hubs = [hub_of(2), hub_of(2)]
    addresses = [f"{hub.listener.port} {TOKEN}" for hub in hubs]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    hub_address._exchanged(store, addresses[0], 1.0)
    if is_over:  # its process is still there, to end its own rank
        hubs[0].report(Report(rank=0, kind=FailureKind.FAILED), 0.0, ended=True)
        hubs[0].work("", 100.0)
        assert hubs[0].culprit is not None
    else:
        hubs[0].listener.close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.05):
            for hub in hubs[not is_over :]:
                hub.work("", 100.0)

    with ThreadPoolExecutor(max_workers=2) as pool:
        working = pool.submit(work)
        found = pool.submit(hub_address._exchanged, store, "", 5.0)
        time.sleep(0.7)
        is_early = found.done()
        hub_address._exchanged(store, addresses[1], 1.0)
        wait([found])
        done.set()
        working.result()
    assert not is_early and found.result() == f"127.0.0.1 {addresses[1]}"
    hubs[not is_over].listener.close()
    hubs[1].listener.close()


def test_who_waits_for_a_hub_in_vain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    hub_address._exchanged(store, f"{free_port()} {TOKEN}", 1.0)
    with pytest.raises(TimeoutError):
        hub_address._exchanged(store, "", 0.7)
