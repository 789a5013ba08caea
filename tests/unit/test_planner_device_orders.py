"""Which device orders are searched in fine units: those that are best in coarse ones."""

import random
from itertools import chain
from types import SimpleNamespace

import pytest

from tests.unit.test_planner_search import lab
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.search.device_orders import (
    COARSE,
    FINE,
    DeviceOrderSearch,
    device_orders,
)

KINDS = ("T4", "L4", "A100-40", "V100-16", "A6000")
# What it has -> kinds, regions, different orders of pools.
CLUSTERS = {
    "four pools": (4, 1, 24),
    "four pools in two regions": (4, 2, 8),
    "five pools": (5, 1, 4),
    "five pools in two regions": (5, 2, 8),
}


def inputs_of(name: str):
    num_kinds, regions, _ = CLUSTERS[name]
    nodes = [
        f"  - {{name: {kind}, count: {at + 1}, gpus: 4 x {kind}, link: PCIe 6 GB/s, nics: 25 Gb/s, "
        f"region: r{at % regions}}}"
        for at, kind in enumerate(KINDS[:num_kinds])
    ]
    between = "between_regions: [{bandwidth: 5 Gb/s, latency: 10 ms}]" if regions > 1 else ""
    return lab("\n".join(["nodes:", *nodes, between, ""]))


def ranks_of(device_order):
    """All ranks along a device order, whatever its units."""
    return tuple(chain(*device_order))


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("name", CLUSTERS)
def test_fine_and_coarse_device_orders_have_the_same_orders(name, halved):
    inputs = inputs_of(name)
    fine, coarse = (
        device_orders(inputs, most_units=most, halved=halved) for most in (FINE, COARSE)
    )
    assert list(map(ranks_of, fine)) == list(map(ranks_of, coarse))
    assert len(set(map(ranks_of, fine))) == len(fine) == CLUSTERS[name][2]
    assert all(len(one) > len(other) for one, other in zip(fine, coarse, strict=True))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", CLUSTERS)
def test_of_many_device_orders_the_six_that_are_best_in_coarse_units_are_searched(
    name, nested, monkeypatch
):
    inputs = inputs_of(name)
    fine, coarse = (
        device_orders(inputs, most_units=most, halved=nested) for most in (FINE, COARSE)
    )
    values: list[int | None] = random.Random(7).sample(range(100), len(coarse))
    values[2] = None  # nothing fits along it
    value_of = dict(zip(coarse, values, strict=True))
    search = DeviceOrderSearch(
        Estimator(inputs), DeviceGroups(inputs), nested=nested, most_groups=8
    )

    def look(device_order, _sizes):
        value_s = value_of[device_order]
        if value_s is None:
            return None
        search.found.append(SimpleNamespace(partition=SimpleNamespace(value_s=value_s)))
        return search.found[-1]

    monkeypatch.setattr(search, "_try_sizes", look)
    found = search._promising_orders()
    assert not search.found, "partitions along coarse units are not proposed"
    if len(coarse) <= 6:
        assert found == fine
        return
    ranked = sorted(
        (value, ranks_of(device_order))
        for device_order, value in value_of.items()
        if value is not None
    )
    assert list(map(ranks_of, found)) == [ranks for _, ranks in ranked[:6]]
    assert set(found) <= set(fine)
