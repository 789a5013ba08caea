"""The clock of an emulated job: it goes as far as the rank behind allows, and no further."""

import itertools

from tests.unit.fake_costs import FakeComm
from zorse_megatron.emulate.conductor import Conductor
from zorse_megatron.emulate.link_clock import LinkModel
from zorse_megatron.emulate.messages import (
    Answer,
    Collective,
    Failure,
    Finish,
    PostOperation,
    Transfer,
    Wait,
)

COMM = FakeComm(bytes_per_s=10.0)
LINE = (("line", 0, 1), 0)
SAID = Transfer(source=0, target=1, num_bytes=30)
READY = Transfer(source=0, target=1, num_bytes=None)


def conductor(num_ranks=2):
    return Conductor(LinkModel(COMM, range(num_ranks)))


def told(conductor):
    return dict(conductor.answers())


def test_a_message_is_answered_at_both_ends_when_it_has_arrived():
    job = conductor()
    job.take(0, PostOperation(now_s=1.0, name=LINE, operation=SAID))
    job.take(1, PostOperation(now_s=0.0, name=LINE, operation=READY))
    job.take(1, Wait(now_s=0.0, name=LINE))
    assert told(job) == {}  # rank 0 is at 1 s and may yet share the link
    job.take(0, Wait(now_s=2.0, name=LINE))
    assert told(job) == {
        0: Answer(now_s=4.0, done=(LINE,)),
        1: Answer(now_s=4.0, done=(LINE,)),
    }


def test_who_asks_later_goes_on_at_once_and_at_its_own_time():
    job = conductor()
    job.take(0, PostOperation(now_s=0.0, name=LINE, operation=SAID))
    job.take(1, PostOperation(now_s=0.0, name=LINE, operation=READY))
    job.take(0, Wait(now_s=9.0, name=LINE))
    assert told(job) == {}  # rank 1 is at 0 s
    job.take(1, Wait(now_s=0.0, name=LINE))
    assert told(job)[1] == Answer(now_s=3.0, done=(LINE,))
    assert told(job) == {}
    job.take(1, Finish())
    assert job.ranks[0].earliest_s == 9.0  # answered together with rank 1


def test_the_order_of_requests_does_not_matter():
    """What two ranks say in their own order gives the same answers, however it is interleaved."""
    first = [
        PostOperation(now_s=1.0, name=LINE, operation=SAID),
        PostOperation(now_s=1.5, name=(("line", 1, 0), 0), operation=_back(None)),
        Wait(now_s=2.0, name=LINE),
    ]
    second = [
        PostOperation(now_s=0.0, name=LINE, operation=READY),
        PostOperation(now_s=2.0, name=(("line", 1, 0), 0), operation=_back(10)),
        Wait(now_s=2.0, name=LINE),
    ]
    results = set()
    for places in itertools.combinations(range(6), 3):
        job, answers = conductor(), {}
        sides = iter(first), iter(second)
        for position in range(6):
            rank = 0 if position in places else 1
            job.take(rank, next(sides[rank]))
            answers |= told(job)
        results.add(tuple(sorted(answers.items())) if len(answers) == 2 else None)
    assert len(results) == 1
    assert None not in results


def _back(num_bytes):
    return Transfer(source=1, target=0, num_bytes=num_bytes)


def test_ranks_that_wait_for_each_other_are_told():
    job = conductor()
    job.take(0, Wait(now_s=1.0, name=LINE))
    assert told(job) == {}
    job.take(1, Wait(now_s=2.0, name=(("line", 1, 0), 0)))
    answers = told(job)
    assert set(answers) == {0, 1}
    for answer in answers.values():
        assert isinstance(answer, Failure)
        assert answer.reason.startswith("all ranks wait for each other: rank 0 waits for")


def test_a_rank_that_is_gone_is_named():
    job = conductor()
    job.take(0, Wait(now_s=1.0, name=LINE))
    job.gone(1)
    assert told(job) == {0: Failure(reason="rank 1 is gone")}


def test_ranks_that_do_not_agree_are_told():
    job = conductor()
    for rank, size in ((0, 8), (1, 16)):
        operation = Collective(kind="all_reduce", ranks=(0, 1), part_bytes=(size,))
        job.take(rank, PostOperation(now_s=0.0, name=(("world",), 0), operation=operation))
        job.take(rank, Wait(now_s=0.0, name=(("world",), 0)))
    answers = told(job)
    assert set(answers) == {0, 1}
    assert "do not agree on operation 0" in answers[0].reason
