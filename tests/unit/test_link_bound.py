"""The bound that counts what must cross a link: no plan that fits is faster."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topologies import node, region_link, two_regions
from tests.unit.planner_cases import best_by_trying, random_case
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import Topology
from zorse_megatron.inputs.cluster import Nics
from zorse_megatron.planner.baselines.lower_bounds import Crossing, link_bound, lower_bound_s, sides
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace
from zorse_megatron.planner.outcome import LinkBound


def with_nics(inputs: Inputs, bytes_per_s: float) -> Inputs:
    """The same nodes, between which there is so much, and memory for everything."""
    nics = Nics(count=1, bandwidth_bytes_per_s=bytes_per_s, latency_s=1e-3)
    spec = Topology.of([dataclasses.replace(each, nics=nics) for each in inputs.spec.nodes])
    plenty = (10**9,) * inputs.world_size
    return dataclasses.replace(inputs, spec=spec, comm=GraphComm(spec), capacities_bytes=plenty)


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [300.0, 1000.0])
def test_no_plan_beats_the_bound(bytes_per_s):
    """Of all plans with one chunk for each group."""
    linked = 0
    for seed in range(10):
        inputs = with_nics(random_case(seed, most_gpus=4, most_layers=6), bytes_per_s)
        bound = link_bound(inputs)
        assert bound.bound_s >= lower_bound_s(inputs)
        linked += bound.link is not None
        assert best_by_trying(inputs, below_s=bound.bound_s, most_simulated=300) is None
    assert linked >= 4


@pytest.mark.slow
def test_a_plan_comes_close_to_the_bound():
    """Two GPUs between which every sample passes for a little longer than they compute."""
    inputs = with_nics(random_case(2, most_gpus=4, most_layers=6), 1000.0)
    many = dataclasses.replace(inputs, global_batch_size=96, space=SearchSpace())
    found = find_plan(many)
    assert found.link_bound.bound_s > 1.02 * found.bound_s
    assert 1.0 <= found.iteration_s / found.link_bound.bound_s < 1.1


sizes = st.floats(1.0, 1e6)


@given(st.integers(1, 12), sizes, sizes, st.floats(1e-6, 1.0))
def test_the_share_taken_off_is_sent_in_the_cheapest_way(layers, samples, layer, share):
    """Of all numbers of layers and parts of the samples whose product is the share."""
    crossing = Crossing(num_layers=layers, samples_bytes=samples, layer_bytes=layer)
    work = share * layers
    ways = (work + (layers - work) * step / 400 for step in range(401))
    best = min((work / count * samples + count * layer for count in ways if count > 0), default=0.0)
    found = crossing.share_bytes(share)
    assert found <= best * (1 + 1e-12)
    # The grid's steps are a quarter of a per cent of all layers.
    coarse = layers / 400 * layer + samples / 400
    assert best <= found * 1.01 + coarse or work < layers / 100


def test_each_way_to_use_both_sides():
    """From a link that is as good as none to one that never counts."""
    inputs = with_nics(random_case(1), 1.0)
    alone_s = {side.link: lower_bound_s(_only(inputs, side.ranks)) for side in sides(inputs.spec)}
    assert len(alone_s) == 2

    def bound_at(bytes_per_s: float) -> LinkBound:
        return link_bound(with_nics(inputs, bytes_per_s))

    fast = bound_at(1e12)
    assert fast == LinkBound(bound_s=lower_bound_s(inputs), link=None)
    # Nothing can be shared: the faster side computes all layers alone.
    none = bound_at(1e-3).bound_s
    assert 0.5 * min(alone_s.values()) < none <= min(alone_s.values())
    falling = [bound_at(10.0**power).bound_s for power in range(-3, 9)]
    assert falling == sorted(falling, reverse=True)


def _only(inputs: Inputs, ranks: tuple[int, ...]) -> Inputs:
    return dataclasses.replace(
        inputs,
        kinds=tuple(inputs.kinds[rank] for rank in ranks),
        capacities_bytes=tuple(inputs.capacities_bytes[rank] for rank in ranks),
    )


def test_sides_are_what_lies_behind_nics_uplinks_and_regions():
    found = {side.link: side for side in sides(two_regions())}
    assert found["the NICs of node w0"].ranks == (0, 1, 2, 3)
    assert found["the uplink of switch leaf1"].ranks == tuple(range(8, 16))
    assert found["the links of region west"].ranks == tuple(range(16))
    west, east = (found[f"the links of region {name}"] for name in ("west", "east"))
    assert west.bytes_per_s == east.bytes_per_s
    alone = Topology.of((node("a"),))
    assert list(sides(alone)) == []


def test_regions_in_a_line_have_the_links_of_each():
    names = ("a", "b", "c")
    links = tuple(
        region_link(pair, rate, 0.0) for pair, rate in ((names[:2], 1e9), (names[1:], 2e9))
    )
    spec = Topology.of(tuple(node(name, region=name) for name in names), region_links=links)
    rates = {side.link[-1]: side.bytes_per_s for side in sides(spec) if "region" in side.link}
    assert rates == {"a": 1e9, "b": 3e9, "c": 2e9}
