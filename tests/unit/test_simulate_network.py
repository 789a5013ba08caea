"""Sharing of links: closed forms, and the theorem that says what a max-min fair share is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.simulate.network import Flow, Network


def flow(num_bytes, links, limit=float(100), usage=1.0):
    return Flow(
        num_bytes=num_bytes, limit_bytes_per_s=limit, links=tuple((link, usage) for link in links)
    )


def finish_times(capacities, flows):
    """Run flows, given as (start, flow), to the end; returns when each ends, in their order."""
    network = Network(capacities)
    starts = sorted(range(len(flows)), key=lambda n: flows[n][0])
    due, ends, now_s = {}, {}, 0.0
    while starts or due:
        finish = min(due.items(), key=lambda item: item[1], default=None)
        if starts and (finish is None or flows[starts[0]][0] <= finish[1][0]):
            number = starts.pop(0)
            now_s = flows[number][0]
            network.start(number, flows[number][1], now_s)
        else:
            bundle, (now_s, version) = finish
            del due[bundle]
            ended = network.finish(bundle, version, now_s)
            assert ended
            ends.update(dict.fromkeys(ended, now_s))
        for time_s, changed, version in network.rebalance(now_s):
            due[changed] = time_s, version
    return [ends[number] for number in range(len(flows))]


def test_alone_a_flow_has_its_limit():
    assert finish_times([10.0], [(1.0, flow(20, [0], limit=5.0))]) == [5.0]


def test_two_flows_halve_a_link():
    assert finish_times([10.0], [(0.0, flow(20, [0])), (0.0, flow(20, [0]))]) == [4.0, 4.0]


def test_who_stays_speeds_up_when_the_other_ends():
    # 10 bytes each at rate 5 until 2 s, then 20 bytes at rate 10.
    assert finish_times([10.0], [(0.0, flow(10, [0])), (0.0, flow(30, [0]))]) == [2.0, 4.0]


def test_who_was_first_slows_down_when_another_comes():
    # Alone until 1 s (10 bytes), then rate 5 for both until the first is done at 3 s.
    assert finish_times([10.0], [(0.0, flow(20, [0])), (1.0, flow(20, [0]))]) == [3.0, 4.0]


def test_a_slow_flow_leaves_the_rest_to_the_other():
    slow, fast = flow(2, [0], limit=1.0), flow(18, [0])
    assert finish_times([10.0], [(0.0, slow), (0.0, fast)]) == [2.0, 2.0]


def test_the_parking_lot():
    """One flow over both links, one on each: 1/2 everywhere if the links are equal."""
    both, first, second = flow(6, [0, 1]), flow(6, [0]), flow(18, [1])
    # Link 1 is three times as wide: the long flow is held by link 0, the rest is the short one's.
    assert finish_times([2.0, 6.0], [(0.0, both), (0.0, first), (0.0, second)]) == pytest.approx(
        [6.0, 6.0, 18 / 5]
    )


def test_flows_that_stand_for_several_count_as_several():
    assert finish_times([12.0], [(0.0, flow(8, [0], usage=3.0))]) == [2.0]


def test_links_that_are_not_full_do_not_tie_flows_together():
    network = Network([100.0, 10.0])
    for number, links in enumerate(([0, 1], [0], [1])):
        network.start(number, flow(10, links, limit=10.0), 0.0)
    network.rebalance(0.0)
    assert network.rates() == {0: 5.0, 1: 10.0, 2: 5.0}
    network.start(3, flow(10, [1], limit=10.0), 1.0)
    # Flow 1, the second bundle, has link 0 in common with flow 0, but that link is not full.
    assert {bundle for _, bundle, _ in network.rebalance(1.0)} == {0, 2}
    assert network.rates() == pytest.approx({0: 10 / 3, 1: 10.0, 2: 10 / 3, 3: 10 / 3})


def test_members_of_a_bundle_come_and_go():
    """Rate 10 shared by those under way: 5, 5 until 3 s, 10 / 3 until 6 s, 5 until 8 s."""
    flows = [(0.0, flow(25, [0])), (0.0, flow(35, [0])), (3.0, flow(20, [0]))]
    assert finish_times([10.0], flows) == pytest.approx([6.0, 8.0, 8.0])


flows_strategy = st.lists(
    st.tuples(
        st.floats(0.1, 100),  # bytes
        st.floats(0.1, 20),  # limit
        st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True),
        st.sampled_from([1.0, 1.0, 2.0, 0.5]),  # usage
    ),
    min_size=1,
    max_size=8,
)


@given(
    capacities=st.lists(st.floats(0.5, 20), min_size=5, max_size=5),
    flows=flows_strategy,
    num_gone=st.integers(0, 7),
)
def test_rates_are_max_min_fair(capacities, flows, num_gone):
    """Bertsekas and Gallager: fair if and only if each flow below its limit has a bottleneck.

    That is a full link on which no other flow has a higher rate.
    """
    network = Network(capacities)
    made = [flow(1e6 + size, links, limit, usage) for size, limit, links, usage in flows]
    due = {}
    for number, one in enumerate(made):
        network.start(number, one, float(number))
        due.update({b: (t, v) for t, b, v in network.rebalance(float(number))})
    for _ in range(num_gone):  # let those go that end first
        if due:
            bundle, (now_s, version) = min(due.items(), key=lambda item: item[1])
            del due[bundle]
            assert network.finish(bundle, version, now_s)
            due.update({b: (t, v) for t, b, v in network.rebalance(now_s)})
    rates = network.rates()
    on = {link: {n: u for n in rates for at, u in made[n].links if at == link} for link in range(5)}
    load = {link: sum(rates[n] * u for n, u in of_link.items()) for link, of_link in on.items()}
    for link, capacity in enumerate(capacities):
        assert load[link] <= capacity * (1 + 1e-6)
    for number, rate in rates.items():
        limit = made[number].limit_bytes_per_s
        bottlenecks = [
            link
            for link, _ in made[number].links
            if load[link] >= capacities[link] * (1 - 1e-6)
            and all(rates[other] <= rate * (1 + 1e-6) for other in on[link])
        ]
        assert rate == pytest.approx(limit, rel=1e-6) or bottlenecks


@given(capacities=st.lists(st.floats(0.5, 20), min_size=5, max_size=5), flows=flows_strategy)
def test_a_link_carries_all_bytes_and_no_faster_than_it_can(capacities, flows):
    made = [(0.0, flow(b, links, limit)) for b, limit, links, _ in flows]
    ends = finish_times(capacities, made)
    for link, capacity in enumerate(capacities):
        crossing = [n for n, (_, _, links, _) in enumerate(flows) if link in links]
        total = sum(flows[n][0] for n in crossing)
        if crossing:
            assert max(ends[n] for n in crossing) >= total / capacity * (1 - 1e-9)
    for (num_bytes, limit, links, _), end_s in zip(flows, ends, strict=True):
        alone_s = num_bytes / min(limit, *(capacities[link] for link in links))
        assert end_s >= alone_s * (1 - 1e-9)
