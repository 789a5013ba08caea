"""A line of GPUs is cut as trying every cut would cut it."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.planner_cases import random_case
from zorse_megatron.planner.closed_form.device_groups import Teams
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.segment_costs import LinePrices, best_sizes
from zorse_megatron.planner.closed_form.segment_tails import LineTails
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.search.contiguous_partition import (
    FINE,
    _covers,
    _least_passages,
    best_cuts,
    lines,
)


def prices_of(inputs: Inputs, *, level: int = 2, nested: bool = False) -> LinePrices:
    """Of the first line of a cluster."""
    estimator = Estimator(inputs)
    line = lines(inputs, most_units=FINE, halved=False)[0]
    return LinePrices(
        inputs,
        estimator.stages,
        Teams(inputs),
        LineTails(inputs, estimator.stages, estimator.networks, line),
        sizes=best_sizes(inputs, estimator.stages, level),
        nested=nested,
    )


def every_cut(prices: LinePrices, start: int = 0, left: int | None = None):
    """All (start, stop, layers) of pieces that cover the line and hold all layers."""
    left = prices.num_layers if left is None else left
    if start == prices.num_units:
        if left == 0:
            yield ()
        return
    for stop in range(start + 1, prices.num_units + 1):
        for held in range(1, left + 1):
            if prices.busy_s[start, stop, held] < math.inf:
                for rest in every_cut(prices, stop, left - held):
                    yield ((start, stop, held), *rest)


def cuts_looked_at(prices: LinePrices, ceiling_s: float):
    """Those in which every piece has as many layers as the ceiling allows, or one less."""
    most = prices.most_layers(ceiling_s * (1 + 1e-9))
    return [
        cut
        for cut in every_cut(prices)
        if all(held in (most[a, b], most[a, b] - 1) for a, b, held in cut)
    ]


@given(seed=st.integers(0, 10_000), level=st.sampled_from([1, 2, 4]), nested=st.booleans())
@example(seed=4532, level=1, nested=True)
@settings(max_examples=60, deadline=None)
def test_the_least_busy_cut_is_found(seed, level, nested):
    inputs = random_case(seed, most_gpus=5, most_layers=7)
    prices = prices_of(inputs, level=level, nested=nested)
    busy = [max(prices.busy_s[piece] for piece in cut) for cut in every_cut(prices)]
    if not busy:
        assert best_cuts(prices, most_groups=9) == []
        return
    assert _covers(prices, min(busy) * (1 + 1e-9))
    assert not _covers(prices, min(busy) * (1 - 1e-9))
    [cut] = _least_passages(prices, [min(busy) * (1 + 1e-9)])
    assert cut is not None and sum(cut.layers) == inputs.num_layers
    assert sorted(rank for group in cut.groups for rank in group) == list(range(inputs.world_size))


@given(seed=st.integers(0, 10_000), slack=st.sampled_from([1.0, 1.1, 1.5]))
@settings(max_examples=60, deadline=None)
def test_of_a_ceiling_the_least_passage_is_found(seed, slack):
    """Where every piece has as many layers as the ceiling allows, or one less."""
    prices = prices_of(random_case(seed, most_gpus=5, most_layers=7))
    cuts = list(every_cut(prices))
    if not cuts:
        return
    ceiling_s = slack * min(max(prices.busy_s[piece] for piece in cut) for cut in cuts)
    allowed = cuts_looked_at(prices, ceiling_s)
    if not allowed:
        return

    def value_s(cut):
        passed_s = 0.0
        for start, stop, held in cut:
            tail_s = prices.tails.per_layer_s[start, stop] * held
            exposed_s = max(0.0, tail_s - 2 / 3 * passed_s)
            passed_s += prices.passage_s[start, stop, held] + exposed_s
        return passed_s

    longer_s = 3 * ceiling_s
    _, found = _least_passages(prices, [longer_s, ceiling_s * (1 + 1e-9)])
    assert found is not None
    bounds = [0]
    sizes = [len(group) for group in found.groups]
    for size in sizes:
        held = 0
        stop = bounds[-1]
        while held < size:
            held += len(prices.units[stop])
            stop += 1
        bounds.append(stop)
    pieces = list(zip(bounds, bounds[1:], found.layers, strict=False))
    assert value_s(pieces) == pytest.approx(min(map(value_s, allowed)), rel=1e-9)
