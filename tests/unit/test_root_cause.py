"""Who is blamed for the end of a job, and when."""

import contextlib

import pytest

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.live.root_cause import (
    FailureKind,
    Limits,
    Report,
    RootCause,
    report_of_end,
)
from zorse_megatron.live.watched_rank import RankPage, WatchedRank

ALL = range(3)
WRONG = PlanError("No", [Problem(where="plan.json", found="a", expected="b", remedy="c")])


def root_cause(*found: tuple[int, FailureKind, float], ended: tuple[int, ...] = ()) -> RootCause:
    new = RootCause(3, Limits())
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
    page = RankPage()
    with contextlib.suppress(BaseException), WatchedRank(page, Limits()).last_words():
        if error is not None:
            raise error
    report = report_of_end(0, status=0, word=page.word.read(), phase="", memory_ran_out=False)
    assert report.kind is kind
    assert reason is None or report.reason == reason
