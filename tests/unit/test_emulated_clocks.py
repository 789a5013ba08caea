"""The clocks of an emulated job: ranks, links, host copies and memory, against closed forms."""

import itertools
import threading
from multiprocessing import Pipe

import pytest
import torch

from tests.unit.fake_costs import FakeComm, node_links
from zorse_megatron.emulate.conductor import Conductor, EmulationFailed, RankClock, call, conducted
from zorse_megatron.emulate.link_clock import (
    Answer,
    Collective,
    Failure,
    Finish,
    LinkClock,
    LinkModel,
    PartExchange,
    PostOperation,
    Transfer,
    Wait,
)
from zorse_megatron.emulate.on_ranks.host_copies import EmulatedHostLink
from zorse_megatron.simulate.assumptions import SimulationError

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


# Ranks.


def test_two_ranks_over_real_connections():
    """Rank 0 computes 2 s and sends 30 bytes over 10 bytes/s; rank 1 waits from 0 s on."""
    found = {}

    def rank_0(clock):
        clock.compute(2.0)
        clock.post(("line",), Transfer(source=0, target=1, num_bytes=30))

    def rank_1(clock):
        name = clock.post(("line",), Transfer(source=0, target=1, num_bytes=None), receives=True)
        clock.wait(name)
        assert clock.now_s == 5.0

    def run(number, work, address):
        clock = RankClock(call(address, number))
        clock.start()
        work(clock)
        clock.finish()
        found[number] = clock.now_s

    with conducted(LinkModel(FakeComm(bytes_per_s=10.0), range(2))) as address:
        threads = [
            threading.Thread(target=run, args=(number, work, address))
            for number, work in enumerate((rank_0, rank_1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == {0: 2.0, 1: 5.0}


def test_time_stands_still_until_the_clock_is_started():
    clock = RankClock(Pipe()[0])
    clock.compute(5.0)
    assert clock.now_s == 0.0


def test_a_conductor_that_ends_is_an_error():
    ours, theirs = Pipe()
    clock = RankClock(ours)
    clock.start()
    threading.Timer(0.05, theirs.close).start()
    with pytest.raises(EmulationFailed, match="the conductor has ended"):
        clock.wait((("line",), 0))


def test_ranks_that_never_call_do_not_hold_up_the_end():
    with conducted(LinkModel(FakeComm(), range(2))) as address:
        call(address, 0).close()


def test_a_conductor_has_a_rank_for_each_gpu():
    assert len(Conductor(LinkModel(FakeComm(), (5, 7))).ranks) == 2


# Links.

LATENCY_S = 0.25
# Ranks 0 and 1 share a NIC of 10 bytes/s, 2 and 3 another; alone a transfer reaches 10 bytes/s.
TWO_NODES = FakeComm(latency_s=LATENCY_S, bytes_per_s=10.0, links=node_links(2, 10.0))


def ends(model, posts):
    """Operation -> when it is done; `posts`: (time, stream, number, operation)."""
    clock = LinkClock(model.capacities_bytes_per_s)
    for at_s, stream, number, operation in posts:
        members = 2 if isinstance(operation, Transfer) else len(operation.ranks)
        work = model.work(operation)
        clock.post(at_s, ((stream,), number), members=members, work=work)
    found = {}
    while clock.next_s < float("inf"):
        done = clock.step()
        found.update({(name[0][0], name[1]): clock.now_s for name in done})
    return found


def both(at_s, name, ranks, num_bytes, receiver_s=None):
    """Both ends of a transfer."""
    (stream, number), (source, target) = name, ranks
    said = Transfer(source=source, target=target, num_bytes=num_bytes)
    ready = Transfer(source=source, target=target, num_bytes=None)
    late_s = at_s if receiver_s is None else receiver_s
    return [(at_s, stream, number, said), (late_s, stream, number, ready)]


def test_a_message_takes_its_bytes_and_the_latency():
    model = LinkModel(TWO_NODES, range(4))
    assert ends(model, both(2.0, ("a", 0), (0, 2), 30)) == {("a", 0): 2.0 + 3.0 + LATENCY_S}


def test_a_message_starts_when_both_ends_are_there():
    model = LinkModel(TWO_NODES, range(4))
    assert ends(model, both(2.0, ("a", 0), (0, 2), 30, receiver_s=5.0)) == {
        ("a", 0): 8.0 + LATENCY_S
    }
    assert ends(model, both(5.0, ("a", 0), (0, 2), 30, receiver_s=2.0)) == {
        ("a", 0): 8.0 + LATENCY_S
    }


def test_messages_of_one_stream_follow_each_other_and_those_of_two_share_the_nic():
    model = LinkModel(TWO_NODES, range(4))
    queued = ends(model, [*both(0, ("a", 0), (0, 2), 30), *both(0, ("a", 1), (0, 2), 30)])
    assert queued == {("a", 0): 3 + LATENCY_S, ("a", 1): 2 * (3 + LATENCY_S)}
    shared = ends(model, [*both(0, ("a", 0), (0, 2), 30), *both(0, ("b", 0), (1, 3), 50)])
    # Half the NIC each until the first is through (6 s), then the second has it alone.
    assert shared == pytest.approx({("a", 0): 6 + LATENCY_S, ("b", 0): 8 + LATENCY_S})
    apart = ends(model, [*both(0, ("a", 0), (0, 2), 30), *both(0, ("b", 0), (2, 0), 50)])
    assert apart == {("a", 0): 3 + LATENCY_S, ("b", 0): 5 + LATENCY_S}  # the NIC's two directions


def test_a_collective_waits_for_its_last_rank():
    model = LinkModel(FakeComm(bytes_per_s=10.0), range(3))
    gather = Collective(kind="all_gather", ranks=(0, 1, 2), part_bytes=(30, 30, 30))
    found = ends(model, [(at_s, "g", 0, gather) for at_s in (1.0, 7.0, 3.0)])
    assert found == {("g", 0): pytest.approx(7.0 + 2 / 3 * 90 / 10)}


@pytest.mark.parametrize(
    ("kind", "seconds_s"),
    [("reduce_scatter", 4.0), ("all_gather", 4.0), ("all_reduce", 8.0), ("broadcast", 50.0)],
)
def test_what_collectives_cost(kind, seconds_s):
    """A ring over two ranks moves half of 80 bytes at 10 bytes/s; an all-reduce goes round twice.

    The other way to all-reduce takes 100 s here; a broadcast is half of that.
    """
    model = LinkModel(FakeComm(bytes_per_s=10.0, statistic_s=100.0), range(2))
    parts = (80,) if kind in ("all_reduce", "broadcast") else (20, 60)
    operation = Collective(kind=kind, ranks=(0, 1), part_bytes=parts)
    assert ends(model, [(0, "g", 0, operation)] * 2) == {("g", 0): pytest.approx(seconds_s)}
    assert model.work(operation).alone_s == pytest.approx(seconds_s)


def test_ranks_of_a_job_may_be_any_gpus():
    """Ranks 0 and 1 of the job are GPUs 3 and 0, which are on different nodes."""
    model = LinkModel(TWO_NODES, (3, 0), link_factors={"nic1>": 0.5})
    assert ends(model, both(0, ("a", 0), (0, 1), 30)) == {("a", 0): 6 + LATENCY_S}
    assert ends(model, both(0, ("a", 0), (1, 0), 30)) == {("a", 0): 3 + LATENCY_S}
    with pytest.raises(SimulationError, match="nic2>"):
        LinkModel(TWO_NODES, (3, 0), link_factors={"nic2>": 0.5})


def test_nothing_happens_before_now():
    clock = LinkClock(())
    clock.post(2.0, (("a",), 0), members=2, work=None)
    assert clock.step() == []
    with pytest.raises(ValueError, match=r"expected nothing before 2\.0 s"):
        clock.post(1.0, (("a",), 0), members=2, work=None)


def test_an_exchange_takes_what_its_busiest_rank_sends_and_receives():
    """Rank 0 sends 20 and 30 bytes, on the NIC of its node 30 of them."""
    model = LinkModel(TWO_NODES, range(4))
    messages = ((0, 1, 20), (0, 2, 30), (2, 3, 10))
    exchange = PartExchange(ranks=(0, 1, 2, 3), messages=messages)
    posts = [(at_s, "a", 0, exchange) for at_s in (0.0, 1.0, 2.0, 1.0)]
    assert ends(model, posts) == pytest.approx({("a", 0): 2.0 + 5.0 + LATENCY_S})
    meeting = Collective(kind="meeting", ranks=(0, 1), part_bytes=())
    assert model.work(meeting).alone_s == 0.0


# Host copies.


class Clock:
    """Stands in for `RankClock`."""

    is_running = True
    now_s = 0.0

    def until(self, moment_s):
        self.now_s = max(self.now_s, moment_s)


def bytes_of(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8)


def link():
    clock = Clock()
    return clock, EmulatedHostLink(clock, None, [], bytes_per_s=10.0)


def test_copies_of_one_direction_follow_each_other():
    clock, host = link()
    first, second = (host.start_to_host(bytes_of(20), bytes_of(20)) for _ in range(2))
    back = host.start_from_host(bytes_of(30), bytes_of(30))
    assert (first.end_s, second.end_s, back.end_s) == (2.0, 4.0, 3.0)
    host.hold_back(first)
    assert clock.now_s == 2.0
    clock.now_s = 7.0  # the link had nothing to do since 4 s
    assert host.start_to_host(bytes_of(10), bytes_of(10)).end_s == 8.0
    host.hold_back(second)
    assert clock.now_s == 7.0


def test_nothing_takes_time_before_the_clock_runs():
    clock, host = link()
    clock.is_running = False
    assert host.start_to_host(bytes_of(20), bytes_of(20)) is None
