"""The bound that every answer prints: no plan that fits is faster."""

import dataclasses

import pytest

from tests.unit.planner_cases import KINDS, best_by_trying, random_case
from zorse_megatron.costs.interface import PassTimes
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace

pytestmark = pytest.mark.slow

MOST_SIMULATED = 300
RECOMPUTING = SearchSpace(schedules=("1f1b",), recompute=("full",), offload=False)


def roomy(seed, **changes):
    """A random cluster with memory for everything, where nothing need be recomputed."""
    inputs = random_case(seed, most_gpus=4, most_layers=6)
    plenty = (10**9,) * inputs.world_size
    return dataclasses.replace(inputs, capacities_bytes=plenty, **changes)


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_beats_the_bound(seed):
    """Of all plans with one chunk for each group; every tenth time also those of any schedule."""
    inputs = roomy(seed)
    bound_s = lower_bound_s(inputs)
    assert best_by_trying(inputs, below_s=bound_s, most_simulated=MOST_SIMULATED) is None
    if seed % 10 == 0:
        found = find_plan(dataclasses.replace(inputs, space=SearchSpace()), stock=())
        assert bound_s <= found.iteration_s


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


def test_micro_batches_that_no_memory_holds_do_not_count():
    inputs = random_case(3)
    fixed = dataclasses.replace(inputs.compute, fixed_s=1.0)
    rich = dataclasses.replace(inputs, compute=fixed, capacities_bytes=(10**9,) * inputs.world_size)
    # One sample of a layer's activations is 1,000 bytes.
    poor = dataclasses.replace(rich, capacities_bytes=(2500,) * inputs.world_size)
    assert lower_bound_s(poor) > 2 * lower_bound_s(rich)
