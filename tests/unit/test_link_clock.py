"""When operations on emulated links are done, against closed forms."""

import pytest

from tests.unit.fake_costs import FakeComm, node_links
from zorse_megatron.emulate.link_clock import LinkClock, LinkModel
from zorse_megatron.emulate.messages import Collective, PartExchange, Transfer
from zorse_megatron.simulate.assumptions import SimulationError

LATENCY_S = 0.25
# Ranks 0 and 1 share a NIC of 10 bytes/s, 2 and 3 another; alone a transfer reaches 10 bytes/s.
COMM = FakeComm(latency_s=LATENCY_S, bytes_per_s=10.0, links=node_links(2, 10.0))


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
    model = LinkModel(COMM, range(4))
    assert ends(model, both(2.0, ("a", 0), (0, 2), 30)) == {("a", 0): 2.0 + 3.0 + LATENCY_S}


def test_a_message_starts_when_both_ends_are_there():
    model = LinkModel(COMM, range(4))
    assert ends(model, both(2.0, ("a", 0), (0, 2), 30, receiver_s=5.0)) == {
        ("a", 0): 8.0 + LATENCY_S
    }
    assert ends(model, both(5.0, ("a", 0), (0, 2), 30, receiver_s=2.0)) == {
        ("a", 0): 8.0 + LATENCY_S
    }


def test_messages_of_one_stream_follow_each_other_and_those_of_two_share_the_nic():
    model = LinkModel(COMM, range(4))
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
    assert model.alone_s(operation) == pytest.approx(seconds_s)


def test_ranks_of_a_job_may_be_any_gpus():
    """Ranks 0 and 1 of the job are GPUs 3 and 0, which are on different nodes."""
    model = LinkModel(COMM, (3, 0), link_factors={"nic1>": 0.5})
    assert ends(model, both(0, ("a", 0), (0, 1), 30)) == {("a", 0): 6 + LATENCY_S}
    assert ends(model, both(0, ("a", 0), (1, 0), 30)) == {("a", 0): 3 + LATENCY_S}
    with pytest.raises(SimulationError, match="nic2>"):
        LinkModel(COMM, (3, 0), link_factors={"nic2>": 0.5})


def test_nothing_happens_before_now():
    clock = LinkClock(())
    clock.post(2.0, (("a",), 0), members=2, work=None)
    assert clock.step() == []
    with pytest.raises(ValueError, match=r"expected nothing before 2\.0 s"):
        clock.post(1.0, (("a",), 0), members=2, work=None)


def test_an_exchange_takes_what_its_busiest_rank_sends_and_receives():
    """Rank 0 sends 20 and 30 bytes, on the NIC of its node 30 of them."""
    model = LinkModel(COMM, range(4))
    messages = ((0, 1, 20), (0, 2, 30), (2, 3, 10))
    exchange = PartExchange(ranks=(0, 1, 2, 3), messages=messages)
    posts = [(at_s, "a", 0, exchange) for at_s in (0.0, 1.0, 2.0, 1.0)]
    assert ends(model, posts) == pytest.approx({("a", 0): 2.0 + 5.0 + LATENCY_S})
    meeting = Collective(kind="meeting", ranks=(0, 1), part_bytes=())
    assert model.alone_s(meeting) == 0.0
