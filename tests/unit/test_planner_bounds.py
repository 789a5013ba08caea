"""Bounds that every answer prints, and how close to the best plans are: against trying all."""

import dataclasses
import os
import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topologies import node, region_link, two_regions
from tests.unit.planner_cases import (
    KINDS,
    TooManyPlansError,
    best_by_trying,
    fits,
    random_case,
    simulated,
)
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.interface import PassTimes
from zorse_megatron.costs.topology import Topology
from zorse_megatron.inputs.cluster import Nics
from zorse_megatron.plan.plan_file import dump_plan, parse_plan
from zorse_megatron.planner.baselines.lower_bounds import Crossing, link_bound, lower_bound_s, sides
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace
from zorse_megatron.planner.outcome import LinkBound, NoPlanError, Outcome, describe_plan

# Work.

MOST_SIMULATED = 300
RECOMPUTING = SearchSpace(
    schedules=("1f1b",), recompute=("full",), offload=False, split_backward=False
)


def roomy(seed, **changes):
    """A random cluster with memory for everything, where nothing need be recomputed."""
    inputs = random_case(seed, most_gpus=4, most_layers=6)
    plenty = (10**9,) * inputs.world_size
    return dataclasses.replace(inputs, capacities_bytes=plenty, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_no_plan_beats_the_bound(seed):
    """Of all plans with one chunk for each group; every tenth time also those of any schedule."""
    inputs = roomy(seed)
    bound_s = lower_bound_s(inputs)
    assert best_by_trying(inputs, below_s=bound_s, most_simulated=MOST_SIMULATED) is None
    if seed % 10 == 0:
        found = find_plan(dataclasses.replace(inputs, space=SearchSpace()), stock=())
        assert bound_s <= found.iteration_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 30, 10))
def test_no_plan_that_recomputes_every_layer_beats_its_bound(seed):
    inputs = roomy(seed, space=RECOMPUTING)
    bound_s = lower_bound_s(inputs, recomputing=True)
    assert lower_bound_s(inputs) < bound_s <= find_plan(inputs, stock=()).iteration_s


class Times:
    """Times by part and kind, in proportion to the samples."""

    def __init__(self, layer_s, head_s):
        self.layer_s, self.head_s = layer_s, head_s

    def _part(self, whole_s, size):
        return PassTimes(forward_s=whole_s * size / 3, backward_s=whole_s * size * 2 / 3)

    def layer(self, kind, size):
        return self._part(self.layer_s[kind], size)

    def embedding(self, kind, size):
        return self._part(0.0, size)

    def head(self, kind, size):
        return self._part(self.head_s[kind], size)

    def recompute_s(self, kind, size, mode):
        return self.layer_s[kind] * size / 3 if mode == "full" else 0.0


@pytest.mark.slow
def test_the_bound_is_the_best_way_to_share_the_work():
    """Two layers and a head. The first GPU takes 1 s for a layer and 8 s for the head, the second
    3 s for either. The second does the heads, 3 s a sample, and the first 2 s of layers; the 1 s
    that the first has too little to do is evened out: it takes part of the heads over, at 8 s for
    3. With a part p of the heads the first takes 2 + 8 p and the second 3 - 3 p: p is 1/11, and a
    sample takes 2 + 8/11 s. No other division is faster."""
    inputs = roomy(3)
    kinds = ("fast", "slow")
    two = dataclasses.replace(
        inputs,
        kinds=kinds,
        capacities_bytes=(10**9,) * 2,
        num_layers=2,
        global_batch_size=11,
        compute=Times(dict(zip(KINDS, (1, 1, 3), strict=True)), {"fast": 8, "slow": 3}),
    )
    assert lower_bound_s(two) == pytest.approx(11 * (2 + 8 / 11))
    # With recomputation a layer takes 4/3 and 4 s: the first now takes 8/3 + 8 p, no other change.
    assert lower_bound_s(two, recomputing=True) == pytest.approx(11 * (8 / 3 + 8 / 33))


@pytest.mark.slow
def test_micro_batches_that_no_memory_holds_do_not_count():
    inputs = random_case(3)
    fixed = dataclasses.replace(inputs.compute, fixed_s=1.0)
    rich = dataclasses.replace(inputs, compute=fixed, capacities_bytes=(10**9,) * inputs.world_size)
    # One sample of a layer's activations is 1,000 bytes.
    poor = dataclasses.replace(rich, capacities_bytes=(2500,) * inputs.world_size)
    assert lower_bound_s(poor) > 2 * lower_bound_s(rich)


# Links.


def with_nics(inputs: Inputs, bytes_per_s: float) -> Inputs:
    """The same nodes, between which there is so much, and memory for everything."""
    nics = Nics(count=1, bandwidth_bytes_per_s=bytes_per_s, latency_s=1e-3)
    spec = Topology.of([dataclasses.replace(each, nics=nics) for each in inputs.spec.nodes])
    plenty = (10**9,) * inputs.world_size
    return dataclasses.replace(inputs, spec=spec, comm=GraphComm(spec), capacities_bytes=plenty)


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [300.0, 1000.0])
def test_no_plan_beats_the_bound_of_links(bytes_per_s):
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


# The best plans.

_WANTED = os.environ.get("ZORSE_OPTIMALITY_CASES")
CASES = int(_WANTED or 20)  # one of which may be missed
GPUS, LAYERS = os.environ.get("ZORSE_OPTIMALITY_SIZE", "6x12" if _WANTED else "4x6").split("x")
SIZE = (int(GPUS), int(LAYERS))
MOST_OF_ALL = 20_000


def case(seed, size):
    most_gpus, most_layers = size
    return random_case(seed, most_gpus=most_gpus, most_layers=most_layers)


@cache
def found(seed, size) -> Outcome | None:
    """None where nothing fits."""
    try:
        return find_plan(case(seed, size), stock=())
    except NoPlanError:
        return None


def excess(seed, size):
    """How much slower the plan is than the best one, as a ratio; 1 where it is 2 % at most."""
    inputs, outcome = case(seed, size), found(seed, size)
    if outcome is None:
        assert best_by_trying(inputs, below_s=1e9, most_simulated=MOST_OF_ALL) is None
        return 1.0
    below_s = outcome.iteration_s / 1.02
    best_s = best_by_trying(inputs, below_s=below_s, most_simulated=MOST_OF_ALL)
    return 1.0 if best_s is None else outcome.iteration_s / best_s


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_plans_are_within_two_percent_of_the_best():
    ratios, undecided = {}, []
    for seed in range(CASES):
        try:
            ratios[seed] = excess(seed, SIZE)
        except TooManyPlansError:
            undecided.append(seed)
    missed = {seed: ratio for seed, ratio in ratios.items() if ratio > 1.0}
    print(f"undecided {undecided}, not within 2 %: {missed}")
    assert max(ratios.values()) <= 1.05, missed
    assert len(missed) + len(undecided) <= 0.05 * CASES, (missed, undecided)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [56, 116, 257])
def test_a_group_of_unequal_gpus_is_found_where_it_is_best(seed):
    """These were missed by 7 to 10 % while its slowest GPU was taken to fill the pipeline."""
    assert excess(seed, (4, 8)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES))
def test_every_accepted_plan_fits(seed):
    inputs, outcome = case(seed, SIZE), found(seed, SIZE)
    if outcome is None:
        return
    assert parse_plan(dump_plan(outcome.plan).encode()) == outcome.plan
    assert fits(inputs, simulated(inputs, outcome.plan))
    assert [each.iteration_s for each in outcome.rejected] == sorted(
        each.iteration_s for each in outcome.rejected
    )
    assert outcome.bound_s == lower_bound_s(inputs) <= outcome.iteration_s
    # What is told differs in more than layers, sizes and recomputation, also from what is taken.
    told = [describe_plan(outcome.plan, inputs.kinds), *(each.what for each in outcome.rejected)]
    bare = [re.sub(r"\d+ layers|, recompute \w+( \d+)?", "", words) for words in told]
    assert len(set(bare)) == len(bare)
