"""Sharing of links: closed forms, and the theorem that says what a max-min fair share is."""

import math

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


def fair_rates(capacities, flows):
    """Progressive filling: all rates rise together, each until its limit or a link is full."""
    rates, rising = [0.0] * len(flows), set(range(len(flows)))
    while rising:
        room = {
            link: capacity
            - sum(rates[n] * dict(each.links).get(link, 0) for n, each in enumerate(flows))
            for link, capacity in enumerate(capacities)
        }
        use = {link: sum(dict(flows[n].links).get(link, 0) for n in rising) for link in room}
        step = min(
            *(flows[n].limit_bytes_per_s - rates[n] for n in rising),
            *(room[link] / use[link] for link in room if use[link]),
        )
        for n in rising:
            rates[n] += step
        full = {link for link in room if use[link] and room[link] - step * use[link] <= 1e-9}
        rising = {
            n
            for n in rising
            if rates[n] < flows[n].limit_bytes_per_s - 1e-9
            and not full & {link for link, _ in flows[n].links}
        }
    return rates


def finish_times_by_filling(capacities, flows):
    """From one start or end of a flow to the next, at the rates that all then have."""
    left = [each.num_bytes for _, each in flows]
    ends, now_s = [math.inf] * len(flows), 0.0
    while math.inf in ends:
        active = [n for n, (start, _) in enumerate(flows) if start <= now_s and ends[n] == math.inf]
        rates = dict(
            zip(active, fair_rates(capacities, [flows[n][1] for n in active]), strict=True)
        )
        starts = [start for start, _ in flows if start > now_s]
        next_s = min([*starts, *(now_s + left[n] / rates[n] for n in active)])
        for n in active:
            left[n] -= rates[n] * (next_s - now_s)
            if left[n] <= 1e-9:
                ends[n] = next_s
        now_s = next_s
    return ends


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


@given(
    capacities=st.lists(st.floats(0.5, 20), min_size=5, max_size=5),
    flows=flows_strategy,
    starts=st.lists(st.floats(0, 20), min_size=8, max_size=8),
    alike=st.integers(1, 3),
)
def test_flows_end_as_by_progressive_filling(capacities, flows, starts, alike):
    """Some of them alike, which share a bundle, with starts of their own."""
    made = [flow(num_bytes, links, limit, usage) for num_bytes, limit, links, usage in flows]
    timed = [(starts[n], each) for n, each in enumerate([*made, *made[:1] * alike][:8])]
    expected = finish_times_by_filling(capacities, timed)
    assert finish_times(capacities, timed) == pytest.approx(expected, rel=1e-6, abs=1e-6)
